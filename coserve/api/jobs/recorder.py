"""Writes the engine's messages about jobs into the registry, in order; later, if the disk refuses them. Watchers are
notified after each commit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from coserve.api.jobs.watchers import JobWatchers
from coserve.api.metrics.prometheus import Metrics
from coserve.api.node import Node
from coserve.core import errors
from coserve.core.cancellation import cancel_all, keep_task
from coserve.core.link import jobs
from coserve.core.link.engine import DropAdapter
from coserve.core.schemas.jobs import Sample
from coserve.core.schemas.service import ErrorInfo
from coserve.core.training.jobs import JobState
from coserve.lora.files.record import record_adapter
from coserve.state.durable import remove_unlisted
from coserve.state.registry.records import JobRecord
from coserve.state.registry.registry import Registry
from coserve.state.retries import FOR_EVER, Retries

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobSample:
    """A sample of job `id` was generated."""

    id: str
    sample: Sample


Progress = jobs.JobProgress | jobs.JobCheckpoint | jobs.JobNote | JobSample
JobMessage = (
    jobs.JobStarted
    | jobs.JobPaused
    | jobs.JobWaiting
    | jobs.JobSucceeded
    | jobs.JobFailed
    | jobs.JobCancelled
    | Progress
)
Write = Callable[[Callable[[Registry], object]], Awaitable[object]]
"""Type of `RegistryThread` itself, and of its `with_reserve`."""

T = TypeVar("T")


class JobRecorder:
    """Writes the messages of all jobs from one queue. Progress and successes that the disk refuses leave the queue, so
    that no other job, and no change of a job's state, waits for them."""

    def __init__(self, node: Node, metrics: Metrics) -> None:
        self._folder, self._registry, self._engine, self._metrics = node.folder, node.registry, node.engine, metrics
        self.retries = Retries(FOR_EVER)
        """Retries of writes that must not be lost, for as long as the machine refuses them."""
        self._lock_retries = Retries(FOR_EVER, errors=errors.StorageBusy)
        self._queue: asyncio.Queue[JobMessage] = asyncio.Queue()
        self._late: dict[str, deque[JobMessage]] = {}
        """Messages of each job that the disk refused, oldest first: progress, then maybe a success and all later ones.
        A job whose checkpoint finds no space waits, so progress is at most the steps between two checkpoints."""
        self._catching_up: dict[str, asyncio.Task[None]] = {}
        self._writing_late = asyncio.Lock()
        self._removals: set[asyncio.Task[None]] = set()
        self.watchers = JobWatchers()
        self.ended: Callable[[str], None] = lambda _: None
        """Called with a job's id after its end was committed. It must return at once."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about messages that cannot be written now and are retried; for /health."""
        return self.retries.notes + self._lock_retries.notes

    def deliver(self, message: JobMessage) -> None:
        self._queue.put_nowait(message)

    @property
    def publishing(self) -> frozenset[str]:
        """Jobs that are trained but whose adapters cannot be read now. No engine has them any more."""
        return frozenset(id for id, late in self._late.items() if _publishes(late))

    async def settled(self) -> None:
        """Wait until every delivered message is written, except those of jobs in `publishing`."""
        await self._queue.join()

    async def files_deleted(self) -> None:
        """Wait until the files of jobs that have ended are deleted."""
        await asyncio.gather(*self._removals)

    async def close(self) -> None:
        """Write unwritten progress; what does not fit on the disk is lost. Jobs in `publishing` are still in it after
        the next start."""
        async with self._writing_late:  # holding the lock, so that no step is written twice
            await cancel_all(self._catching_up.values())
        await self.files_deleted()
        for id in list(self._late):
            await self._flush(id)

    async def run(self) -> None:
        """Write one message after the other, until cancelled."""
        while True:
            message = await self._queue.get()
            try:
                await self._take(message)
            finally:
                self._queue.task_done()

    async def _take(self, message: JobMessage) -> None:
        """Write a message after all earlier ones of its job, or keep it for later."""
        id, late = message.id, self._late.get(message.id)
        if late is None or not (isinstance(message, Progress) or _publishes(late)):
            if late is not None:
                await self._flush(id)
            try:
                await self._record(message)
                return
            except errors.StorageError:
                pass
        self._late.setdefault(id, deque()).append(message)
        if id not in self._catching_up:
            self._catching_up[id] = asyncio.create_task(self._catch_up(id))

    async def _record(self, message: JobMessage, *, late: bool = False) -> None:
        """Write a message, whatever fails, and notify watchers. Raises `StorageError` for progress and a success that
        the disk refuses; a `late` one is tried until it is written."""
        id, name = message.id, type(message).__name__
        try:
            if isinstance(message, jobs.JobSucceeded) and not late:
                await self._apply(message)
            else:
                once = isinstance(message, Progress | jobs.JobWaiting) and not late
                retries = self._lock_retries if once else self.retries
                await retries.run(f"job {id}", lambda: self._apply(message))
        except (errors.WrongJobState, errors.JobNotFound) as error:
            await self._correct_engine(message, error)
        except errors.CoserveError as error:
            if isinstance(error, errors.StorageError) and isinstance(message, Progress | jobs.JobSucceeded):
                raise
            log.error("job %s: %s not written: %s", id, name, error.message)
        except Exception:  # our own fault in one message: the others must still be written
            log.exception("job %s: %s not written", id, name)
            await self._fail(message)
        self.watchers.notify(id)

    async def _catch_up(self, id: str) -> None:
        """Write a job's late messages in order, as soon as the disk accepts them."""
        try:
            while (late := self._late.get(id)) is not None:
                if not isinstance(late[0], Progress):
                    await self._record(late[0], late=True)
                    self._drop_first(id)
                    continue
                try:
                    await self.retries.run("progress of jobs", partial(self._write_late, id, self._registry))
                except (errors.WrongJobState, errors.JobNotFound):  # the job was deleted meanwhile
                    self._drop_first(id)
                self.watchers.notify(id)
        finally:
            del self._catching_up[id]

    async def _flush(self, id: str) -> None:
        """Write a job's late progress before its state changes, with the reserved space on a full disk."""
        try:
            await self._write_late(id, self._registry.with_reserve)
        except errors.StorageError as error:
            log.warning("job %s: its last steps are written later: %s", id, error.message)
        except errors.CoserveError:
            self._late.pop(id, None)

    async def _write_late(self, id: str, write: Write) -> None:
        async with self._writing_late:
            while id in self._late and isinstance(message := self._late[id][0], Progress):
                await self._write_progress(message, write)
                self._drop_first(id)

    def _drop_first(self, id: str) -> None:
        """Forget the first of a job's late messages."""
        if late := self._late.get(id):
            late.popleft()
            if not late:
                del self._late[id]

    async def _write_progress(self, message: Progress, write: Write) -> None:
        match message:
            case jobs.JobProgress(id=id, metrics=metrics):
                await write(lambda registry: registry.record_step(id, metrics))
                self._metrics.step(metrics.tokens)
            case jobs.JobCheckpoint(id=id, step=step):
                text = f"checkpoint at step {step}"
                await write(lambda registry: registry.record_message(id, text, type="checkpoint"))
            case JobSample(id=id, sample=sample):
                await write(lambda registry: registry.record_sample(id, sample))
            case jobs.JobNote(id=id, message=text, kept=True):
                await write(lambda registry: registry.record_note(id, text))
            case jobs.JobNote(id=id, message=text):
                await write(lambda registry: registry.record_message(id, text, level="warning"))

    async def _apply(self, message: JobMessage) -> None:
        id = message.id
        match message:
            case jobs.JobStarted(total_steps=total, resumed_from=step, note=note):
                await self._registry.with_reserve(lambda registry: registry.record_start(id, total, step, note))
            case jobs.JobPaused():
                await self._registry.with_reserve(lambda registry: registry.set_state(id, JobState.PAUSED))
            case jobs.JobWaiting(message=text):
                await self._registry.with_reserve(lambda registry: registry.record_waiting(id, text))
            case jobs.JobSucceeded():
                await self._succeed(message)
            case jobs.JobFailed(code=code, message=text):
                await self.fail(id, code, text)
            case jobs.JobCancelled():
                await self.end(id, lambda registry: registry.set_state(id, JobState.CANCELLED))
            case _:
                await self._write_progress(message, self._registry)

    async def _succeed(self, message: jobs.JobSucceeded) -> None:
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
        if isinstance(message, Progress | jobs.JobWaiting):
            return
        id, what = message.id, type(message).__name__
        text = f"what the engine said of the job ({what}) could not be recorded; see the daemon's log"
        try:
            await self.retries.run(f"job {id}", lambda: self.fail(id, errors.InternalError.code, text))
            self._engine.offer(jobs.CancelJob(id=id))
            if isinstance(message, jobs.JobSucceeded):
                await self._discard(message)
        except Exception:  # our own fault in one job: messages of others must still be written
            log.exception("job %s: its failure is not written", id)

    async def _correct_engine(self, message: JobMessage, error: errors.CoserveError) -> None:
        """Handle an engine that runs a job which has ended in the registry: cancel it there and delete what it
        published. Never raises."""
        if isinstance(message, jobs.JobCancelled):
            return  # the answer to `CancelJob`: the engine runs the job no more
        log.warning("job %s: %s refused: %s", message.id, type(message).__name__, error.message)
        try:
            record = await self.retries.run(f"job {message.id}", lambda: self._find(message.id))
            if isinstance(message, jobs.JobSucceeded):
                find = partial(Registry.find_version, ref=message.ref)
                if await self.retries.run(f"job {message.id}", lambda: self._registry(find)) is not None:
                    return  # published by this job: the message came twice
                await self._discard(message)
            elif record is None or record.state.terminal:
                self._engine.offer(jobs.CancelJob(id=message.id))
        except (OSError, errors.CoserveError) as problem:
            log.warning("job %s: the engine still has it: %s", message.id, problem)

    async def _discard(self, message: jobs.JobSucceeded) -> None:
        """Delete what a job published if the registry does not have it: the engine's copy and the files."""
        self._engine.offer(DropAdapter(ref=message.ref))
        await remove_unlisted(self._folder.adapter(message.ref), f"adapter {message.ref}")

    async def _find(self, id: str) -> JobRecord | None:
        try:
            return await self._registry(lambda registry: registry.job(id))
        except errors.JobNotFound:
            return None


def _publishes(late: deque[JobMessage]) -> bool:
    """Return whether a success is among these messages."""
    return any(isinstance(message, jobs.JobSucceeded) for message in late)
