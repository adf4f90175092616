"""Recovery at startup: makes the registry and the files consistent after a crash.

A row is committed after its files are durable. Files without a row belong to a request that was never answered, and are
deleted. A row without files was damaged from outside; it is deleted with a note. A checkpoint has no row: it is kept if
the metrics of its step are recorded.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from coserve.core.errors import JobNotFound, StartupError, StorageError, StorageFailed
from coserve.core.names import ADAPTER_FILES, CHECKPOINT_STATE, file_name
from coserve.core.schemas.service import ErrorInfo
from coserve.core.training.jobs import JobState
from coserve.core.validation import decode_json
from coserve.state.durable import read_errors, remove_dir
from coserve.state.failpoints import failpoint
from coserve.state.folder import DataFolder
from coserve.state.registry.records import JobRecord
from coserve.state.registry.registry import Registry

log = logging.getLogger(__name__)


def recover(registry: Registry, folder: DataFolder) -> list[JobRecord]:
    """Check the registry, remove leftovers, and return the unfinished jobs, oldest first.

    A job that was running is queued again, with an event. Call it under `folder.lock()`. Raises `StartupError` if
    the registry is damaged, or was lost: then nothing is removed.
    """
    registry.check()
    if not registry.has_claimed_versions() and (refs := folder.adapter_refs()):
        raise StartupError(
            f"the registry {folder.database} is new or empty, but {folder.adapters} has files of {len(refs)} adapter "
            f"versions, {refs[0]} for one: put the registry back, or move these files away and import them again"
        )
    for name in folder.sweep():
        log.info("removed what an interrupted write left: %s", name)
    _match_adapters(registry, folder)
    jobs = [job for job in registry.unfinished() if _can_run(registry, folder, job)]
    _match_jobs(folder, registry.unfinished_ids())
    for job in jobs:
        try:
            drop_unrecorded_checkpoints(folder, job)
        except StorageFailed as error:  # the deletion is retried before the first engine gets the job
            log.warning("%s", error.message)
    return [_requeue(registry, job) for job in jobs]


def drop_unrecorded_checkpoints(folder: DataFolder, job: JobRecord) -> None:
    """Remove checkpoints of steps that the registry has not recorded. Call it when the engine that wrote them is gone.

    A job that resumed from such a checkpoint would lack those steps in its loss curve, so the steps run again. A
    checkpoint written before its own step's evaluation contains that step's metrics, which the job reports when it
    resumes. Raises `StorageError` if the machine cannot read or delete a checkpoint now.
    """
    for step, path in folder.checkpoints(job.spec.id):
        if step > job.step + 1 or (
            step == job.step + 1 and not _has_metrics(path, f"job {job.spec.id}: checkpoint {step}")
        ):
            log.info("job %s: checkpoint %d removed: its metrics were lost", job.spec.id, step)
            remove_dir(path)


class _Progress(msgspec.Struct):
    """The field of `finetune.checkpoint`'s progress that recovery reads."""

    pending: dict[str, object] | None = None


class _State(msgspec.Struct):
    progress: _Progress


def _has_metrics(checkpoint: Path, name: str) -> bool:
    """Return whether the checkpoint contains its step's metrics; also False for a missing or damaged state, from which
    no job can resume. Raises `StorageError`."""
    try:
        with read_errors():
            failpoint("job.open")
            state = decode_json((checkpoint / CHECKPOINT_STATE).read_bytes(), _State)
    except (FileNotFoundError, msgspec.DecodeError):
        return False
    except StorageError as error:
        raise type(error)(f"{name} cannot be read now: {error.message}") from error
    return state.progress.pending is not None


def _match_adapters(registry: Registry, folder: DataFolder) -> None:
    for ref in registry.adapter_refs():
        missing = [name for name in ADAPTER_FILES if not (folder.adapter(ref) / name).is_file()]
        if missing:
            log.warning("adapter %s dropped from the registry: its %s is gone", ref, missing[0])
            registry.drop_version(ref, f"its {missing[0]} was gone when the daemon started")
    known = set(registry.adapter_refs())
    for ref in folder.adapter_refs():
        if ref not in known:
            log.info("removed files of %s, which was never published", ref)
            remove_dir(folder.adapter(ref))
    names = {file_name(ref.id) for ref in known}
    for entry in folder.adapters.iterdir():
        if entry.is_dir() and entry.name not in names:
            remove_dir(entry)


def _match_jobs(folder: DataFolder, unfinished: set[str]) -> None:
    """Delete files of jobs that have ended or were never accepted: no job resumes from them."""
    for id in folder.job_ids():
        if id not in unfinished:
            log.info("removed files of job %s, which is over or was never accepted", id)
            remove_dir(folder.jobs / id)


def _can_run(registry: Registry, folder: DataFolder, job: JobRecord) -> bool:
    """Return whether a job's corpus, and the record of the job that it waits for, are there; otherwise it fails."""
    unprepared = job.document is not None and not job.prepared
    error = ErrorInfo(code="corpus_missing", message="its corpus was gone when the daemon started")
    if (folder.document if unprepared else folder.corpus)(job.spec.id).is_file():
        if job.after is None:
            return True
        try:
            registry.predecessor(job)
            return True
        except JobNotFound as missing:
            error = ErrorInfo(code=missing.code, message=f"the job was to continue from another: {missing.message}")
    log.warning("job %s failed: %s", job.spec.id, error.message)
    registry.set_state(job.spec.id, JobState.FAILED, error=error)
    return False


def _requeue(registry: Registry, job: JobRecord) -> JobRecord:
    if job.state is not JobState.RUNNING:
        return job
    return registry.set_state(job.spec.id, JobState.QUEUED, message="interrupted: the daemon ended while it ran")
