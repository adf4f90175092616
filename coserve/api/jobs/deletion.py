"""Deletes jobs that have ended."""

from __future__ import annotations

import asyncio
import logging

from coserve.api.jobs.recorder import JobRecorder
from coserve.core.errors import StorageError
from coserve.core.schemas import DeletedJob
from coserve.state.durable import remove_dir
from coserve.state.folder import DataFolder
from coserve.state.thread import RegistryThread

log = logging.getLogger(__name__)


async def delete_job(id: str, registry: RegistryThread, folder: DataFolder, recorder: JobRecorder) -> DeletedJob:
    """Delete a job's record and events, then its files; durable when it returns. Its adapter stays.

    Raises `JobNotFound`, `WrongJobState`, `StorageError`.
    """
    record = await registry.with_reserve(lambda registry: registry.delete_job(id))
    recorder.watchers.notify(id)
    try:
        await asyncio.to_thread(remove_dir, folder.job(id))
    except (OSError, StorageError) as error:  # the job counts as deleted anyway
        log.warning("job %s: its files stay until the next start: %s", id, error)
    result = None if record.result is None else str(record.result)
    return DeletedJob(id=id, adapter=record.spec.adapter, result=result)
