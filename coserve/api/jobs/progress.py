"""Writes the steps, checkpoints and notes of jobs into the registry, later if the disk refuses them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from coserve.api.jobs.watchers import JobWatchers
from coserve.api.metrics.prometheus import Metrics
from coserve.core.errors import CoserveError, JobNotFound, StorageError, WrongJobState
from coserve.core.link.jobs import JobCheckpoint, JobNote, JobProgress
from coserve.core.schemas.jobs import Sample
from coserve.state.registry.registry import Registry
from coserve.state.retries import Retries
from coserve.state.thread import RegistryThread

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobSample:
    """A sample of job `id` was generated."""

    id: str
    sample: Sample


Progress = JobProgress | JobCheckpoint | JobNote | JobSample
Write = Callable[[Callable[[Registry], object]], Awaitable[object]]
"""Type of `RegistryThread` itself, and of its `with_reserve`."""


class ProgressWriter:
    """Writes progress. Messages that the disk refuses stay in memory, so that no change of a job's state waits for
    them.

    `lock_retries` retry only `StorageBusy`.
    """

    def __init__(
        self, registry: RegistryThread, metrics: Metrics, watchers: JobWatchers, retries: Retries, lock_retries: Retries
    ) -> None:
        self._registry, self._metrics, self._watchers = registry, metrics, watchers
        self._retries, self._lock_retries = retries, lock_retries
        self._late: dict[str, deque[Progress]] = {}
        """Unwritten progress of each job, oldest first. A job whose checkpoint finds no space waits, so this is at most
        the steps between two checkpoints."""
        self._catching_up: asyncio.Task[None] | None = None
        self._writing_late = asyncio.Lock()

    async def write(self, message: Progress) -> None:
        """Write the message now, or keep it for later if the disk refuses it."""
        if message.id in self._late:
            self._postpone(message)
            return
        try:
            await self._lock_retries.run(f"progress of job {message.id}", lambda: self._record(message, self._registry))
        except StorageError:
            self._postpone(message)

    async def flush(self, id: str) -> None:
        """Write a job's unwritten progress before its state changes, with the reserved space on a full disk."""
        if id not in self._late:
            return
        try:
            await self._write_late(id, self._registry.with_reserve)
        except StorageError as error:
            log.warning("job %s: its last steps are written later: %s", id, error.message)
        except CoserveError:
            self._late.pop(id, None)

    async def close(self) -> None:
        """Write all unwritten progress, with the reserved space if needed; the rest is lost."""
        if self._catching_up is not None:
            async with self._writing_late:  # holding the lock, so that no step is written twice
                self._catching_up.cancel()
        for id in list(self._late):
            await self.flush(id)

    def _postpone(self, message: Progress) -> None:
        self._late.setdefault(message.id, deque()).append(message)
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        """Write all unwritten progress as soon as the disk accepts it."""
        while self._late:
            id = next(iter(self._late))
            try:
                await self._retries.run("progress of jobs", partial(self._write_late, id, self._registry))
            except (WrongJobState, JobNotFound):  # the job was deleted meanwhile
                self._late.pop(id, None)
            self._watchers.notify(id)

    async def _write_late(self, id: str, write: Write) -> None:
        async with self._writing_late:
            while waiting := self._late.get(id):
                await self._record(waiting[0], write)
                waiting.popleft()
            self._late.pop(id, None)

    async def _record(self, message: Progress, write: Write) -> None:
        match message:
            case JobProgress(id=id, metrics=metrics):
                await write(lambda registry: registry.record_step(id, metrics))
                self._metrics.step(metrics.tokens)
            case JobCheckpoint(id=id, step=step):
                await write(lambda registry: registry.record_checkpoint(id, step))
            case JobSample(id=id, sample=sample):
                await write(lambda registry: registry.record_sample(id, sample))
            case JobNote(id=id, message=text, kept=True):
                await write(lambda registry: registry.record_note(id, text))
            case JobNote(id=id, message=text):
                await write(lambda registry: registry.record_message(id, text, level="warning"))
