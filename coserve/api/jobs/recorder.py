"""Writes the engine's messages about jobs into the registry, in order; watchers are notified after each commit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from coserve.api.jobs.progress import Progress, ProgressWriter
from coserve.api.jobs.watchers import JobWatchers
from coserve.api.metrics.prometheus import Metrics
from coserve.api.node import Node
from coserve.core import errors
from coserve.core.cancellation import cancel_all, keep_task
from coserve.core.link.engine import DropAdapter
from coserve.core.link.jobs import CancelJob, JobCancelled, JobFailed, JobPaused, JobStarted, JobSucceeded, JobWaiting
from coserve.core.schemas.service import ErrorInfo
from coserve.core.training.jobs import JobState
from coserve.core.types import AdapterRef
from coserve.lora.files.record import record_adapter
from coserve.state.durable import remove_unlisted
from coserve.state.registry.records import JobRecord
from coserve.state.registry.registry import Registry
from coserve.state.retries import FOR_EVER, Retries

log = logging.getLogger(__name__)

StateMessage = JobStarted | JobPaused | JobWaiting | JobSucceeded | JobFailed | JobCancelled
JobMessage = StateMessage | Progress

T = TypeVar("T")


class JobRecorder:
    """Writes the messages of all jobs from one queue. Messages that wait for a job's adapter leave the queue."""

    def __init__(self, node: Node, metrics: Metrics) -> None:
        self._folder, self._registry, self._engine, self._metrics = node.folder, node.registry, node.engine, metrics
        self.retries = Retries(FOR_EVER)
        """Retries of writes that must not be lost, for as long as the machine refuses them."""
        self._lock_retries = Retries(FOR_EVER, errors=errors.StorageBusy)
        self._queue: asyncio.Queue[JobMessage] = asyncio.Queue()
        self._held: dict[str, deque[JobMessage]] = {}
        """For each job: a success that cannot be written now, and the job's later messages."""
        self._publications: set[asyncio.Task[None]] = set()
        self._removals: set[asyncio.Task[None]] = set()
        self.watchers = JobWatchers()
        self.ended: Callable[[str], None] = lambda _: None
        """Called with a job's id after its end was committed. It must return at once."""
        self._progress = ProgressWriter(node.registry, metrics, self.watchers, self.retries, self._lock_retries)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about messages that cannot be written now and are retried; for /health."""
        return self.retries.notes + self._lock_retries.notes

    def deliver(self, message: JobMessage) -> None:
        self._queue.put_nowait(message)

    @property
    def publishing(self) -> frozenset[str]:
        """Jobs that are trained but whose adapters cannot be read now. No engine has them any more."""
        return frozenset(self._held)

    async def settled(self) -> None:
        """Wait until every delivered message is written, except those of jobs in `publishing`."""
        await self._queue.join()

    async def files_deleted(self) -> None:
        """Wait until the files of jobs that have ended are deleted."""
        await asyncio.gather(*self._removals)

    async def close(self) -> None:
        """Write unwritten progress; what does not fit on the disk is lost. Jobs in `publishing` are still in it after
        the next start."""
        await cancel_all(self._publications)
        await self.files_deleted()
        await self._progress.close()

    async def run(self) -> None:
        """Write one message after the other, until cancelled."""
        while True:
            message = await self._queue.get()
            try:
                if (held := self._held.get(message.id)) is not None:
                    held.append(message)
                else:
                    await self._record(message)
            finally:
                self._queue.task_done()

    async def _record(self, message: JobMessage) -> None:
        """Write a message, whatever fails, and notify watchers."""
        try:
            await self._write(message)
        except (errors.WrongJobState, errors.JobNotFound) as error:
            await self._correct_engine(message, error)
        except errors.CoserveError as error:
            log.error("job %s: %s not written: %s", message.id, type(message).__name__, error.message)
        except Exception:  # our own fault in one message: the others must still be written
            log.exception("job %s: %s not written", message.id, type(message).__name__)
            await self._fail(message)
        self.watchers.notify(message.id)

    async def _write(self, message: JobMessage) -> None:
        """Write a change of state, after all progress before it, and retry until it is written. A success that cannot
        be written at once is held instead, so that messages of other jobs do not wait for its files."""
        id = message.id
        if isinstance(message, Progress):
            await self._progress.write(message)
            return
        await self._progress.flush(id)
        if isinstance(message, JobSucceeded) and id not in self._held:
            try:
                await self._apply(message)
            except errors.StorageError:
                self._hold(message)
            return
        retries = self._lock_retries if isinstance(message, JobWaiting) else self.retries
        await retries.run(f"job {id}", lambda: self._apply(message))

    def _hold(self, message: JobSucceeded) -> None:
        self._held[message.id] = deque([message])
        keep_task(self._write_held(message.id), self._publications)

    async def _write_held(self, id: str) -> None:
        """Write a job's held messages in order."""
        held = self._held[id]
        while held:
            await self._record(held[0])
            held.popleft()
        del self._held[id]

    async def _apply(self, message: StateMessage) -> None:
        id = message.id
        match message:
            case JobStarted(total_steps=total, resumed_from=step, note=note):
                await self._registry.with_reserve(lambda registry: registry.record_start(id, total, step, note))
            case JobPaused():
                await self._registry.with_reserve(lambda registry: registry.set_state(id, JobState.PAUSED))
            case JobWaiting(message=text):
                await self._registry.with_reserve(lambda registry: registry.record_waiting(id, text))
            case JobSucceeded():
                await self._succeed(message)
            case JobFailed(code=code, message=text):
                await self.fail(id, code, text)
            case JobCancelled():
                await self.end(id, lambda registry: registry.set_state(id, JobState.CANCELLED))

    async def _succeed(self, message: JobSucceeded) -> None:
        """Commit the adapter and the job's end together; files that cannot be read back fail the job."""
        id, path, spec = message.id, self._folder.adapter(message.ref), self._engine.spec
        describe = partial(record_adapter, path, message.ref, spec, source=f"job:{id}", created_at=time.time())
        try:
            record = await asyncio.to_thread(describe)
        except errors.AdapterError as error:
            await self.fail(id, error.code, error.message)
            await self._discard(message)
        else:
            await self.end(id, lambda registry: registry.succeed(id, record))

    async def change(self, id: str, change: Callable[[Registry], T]) -> T:
        """Commit a change of a job, also on a full disk, and notify its watchers."""
        changed = await self._registry.with_reserve(change)
        self.watchers.notify(id)
        return changed

    async def fail(self, id: str, code: str, message: str) -> None:
        """Commit a job's end as failed: see `end`."""
        error = ErrorInfo(code=code, message=message)
        await self.end(id, lambda registry: registry.set_state(id, JobState.FAILED, error=error))

    async def end(self, id: str, change: Callable[[Registry], JobRecord]) -> JobRecord:
        """Commit a job's end. Its corpus and checkpoints, which may be gigabytes, are deleted later, so no caller
        waits."""
        record = await self.change(id, change)
        self._metrics.job_ended(record.state)
        self.ended(id)
        keep_task(remove_unlisted(self._folder.job(id), f"job {id}"), self._removals)
        return record

    async def _fail(self, message: JobMessage) -> None:
        """Fail a job whose change of state could not be written; otherwise its record would be wrong until the next
        engine. Never raises."""
        if isinstance(message, Progress | JobWaiting):
            return
        id, what = message.id, type(message).__name__
        text = f"what the engine said of the job ({what}) could not be recorded; see the daemon's log"
        try:
            await self.retries.run(f"job {id}", lambda: self.fail(id, errors.InternalError.code, text))
            self._engine.offer(CancelJob(id=id))
            if isinstance(message, JobSucceeded):
                await self._discard(message)
        except Exception:  # our own fault in one job: messages of others must still be written
            log.exception("job %s: its failure is not written", id)

    async def _correct_engine(self, message: JobMessage, error: errors.CoserveError) -> None:
        """Handle an engine that runs a job which has ended in the registry: cancel it there and delete what it
        published. Never raises."""
        if isinstance(message, JobCancelled):
            return  # the answer to `CancelJob`: the engine runs the job no more
        log.warning("job %s: %s refused: %s", message.id, type(message).__name__, error.message)
        try:
            record = await self.retries.run(f"job {message.id}", lambda: self._find(message.id))
            if isinstance(message, JobSucceeded):
                if await self.retries.run(f"job {message.id}", lambda: self._is_published(message.ref)):
                    return  # published by this job: the message came twice
                await self._discard(message)
            elif record is None or record.state.terminal:
                self._engine.offer(CancelJob(id=message.id))
        except (OSError, errors.CoserveError) as problem:
            log.warning("job %s: the engine still has it: %s", message.id, problem)

    async def _discard(self, message: JobSucceeded) -> None:
        """Delete what a job published if the registry does not have it: the engine's copy and the files."""
        self._engine.offer(DropAdapter(ref=message.ref))
        await remove_unlisted(self._folder.adapter(message.ref), f"adapter {message.ref}")

    async def _is_published(self, ref: AdapterRef) -> bool:
        refs = await self._registry(lambda registry: registry.adapter_refs())
        return ref in refs

    async def _find(self, id: str) -> JobRecord | None:
        try:
            return await self._registry(lambda registry: registry.job(id))
        except errors.JobNotFound:
            return None
