"""What the engine says of jobs, written into the registry in order; announced only once it is on disk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from coserve.adapters.record import record_adapter
from coserve.api.engine_client import EngineClient
from coserve.api.metrics.prometheus import Metrics
from coserve.errors import (
    AdapterError,
    CoserveError,
    EngineUnavailable,
    JobNotFound,
    StorageBusy,
    StorageError,
    WrongJobState,
)
from coserve.link import (
    CancelJob,
    DropAdapter,
    JobCancelled,
    JobCheckpoint,
    JobFailed,
    JobPaused,
    JobProgress,
    JobStarted,
    JobSucceeded,
    JobWaiting,
)
from coserve.schemas import ErrorInfo
from coserve.state.durable import remove_dir
from coserve.state.folder import DataFolder
from coserve.state.records import JobRecord
from coserve.state.registry import Registry
from coserve.state.retries import FOR_EVER, Backoff, Retries
from coserve.state.thread import RegistryThread
from coserve.types import JobState

log = logging.getLogger(__name__)

JobMessage = JobStarted | JobPaused | JobProgress | JobCheckpoint | JobWaiting | JobSucceeded | JobFailed | JobCancelled

Progress = JobProgress | JobCheckpoint
Writing = Callable[[Callable[[Registry], object]], Awaitable[object]]
"""How the registry is changed: `RegistryThread` itself, or its `with_reserve`."""

T = TypeVar("T")


class JobRecorder:
    """Writes the story of jobs and tells who watches. `backoff`: how what the machine cannot do now is tried again;
    `sleep` takes seconds."""

    def __init__(
        self,
        folder: DataFolder,
        registry: RegistryThread,
        engine: EngineClient,
        metrics: Metrics,
        *,
        backoff: Backoff = FOR_EVER,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._registry, self._engine, self._metrics = folder, registry, engine, metrics
        self._clock = clock
        self._retries = Retries(backoff, sleep=sleep)
        self._waits = Retries(backoff, errors=StorageBusy, sleep=sleep)
        self._late: dict[str, deque[Progress]] = {}
        """Progress that the disk refused, of each job, oldest first; kept in memory until it can be written. A job
        whose checkpoint finds no space waits, so these are at most the steps between two checkpoints."""
        self._catching_up: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        """Held while late progress is written: by the catch-up, or before a change of state."""
        self._inbox: asyncio.Queue[JobMessage] = asyncio.Queue()
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self.deaths: Counter[str] = Counter()
        """Engines that ended while they ran a job, since its last checkpoint."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What cannot be written now and is tried again; for /health."""
        return self._retries.notes + self._waits.notes

    def deliver(self, message: JobMessage) -> None:
        self._inbox.put_nowait(message)

    async def settled(self) -> None:
        """Wait until all that was delivered is on disk."""
        await self._inbox.join()

    async def run(self) -> None:
        """Write for ever, one message after the other."""
        while True:
            message = await self._inbox.get()
            try:
                await self._write(message)
            except (WrongJobState, JobNotFound) as error:
                await self._contradict(message, error)
            except CoserveError as error:
                log.error("job %s: %s not written: %s", message.id, type(message).__name__, error.message)
            except Exception:  # our own fault, in one message: the others must still be written
                log.exception("job %s: %s not written", message.id, type(message).__name__)
            finally:
                self._inbox.task_done()
            self.announce(message.id)

    async def _write(self, message: JobMessage) -> None:
        """Progress that the disk refuses is written later, so that no change of state waits for it; a change of state is
        tried again until it is written, after the progress before it. Nothing is lost to a lock."""
        id = message.id
        if isinstance(message, Progress):
            if id in self._late:
                self._postpone(message)
                return
            try:
                await self._waits.run(f"progress of job {id}", lambda: self._apply(message))
            except StorageError:
                self._postpone(message)
            return
        if id in self._late:
            await self._before_change(id)
        if isinstance(message, JobWaiting):
            await self._waits.run(f"job {id}", lambda: self._apply(message))
        else:
            await self.insist(lambda: self._apply(message), f"job {id}")

    # ---- progress that the disk refused

    def _postpone(self, message: Progress) -> None:
        self._late.setdefault(message.id, deque()).append(message)
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.create_task(self._catch_up())

    async def close(self) -> None:
        """Write what is late with the space that is kept back, if need be; what does not fit is lost with the process."""
        if self._catching_up is not None:
            async with self._one_at_a_time:  # a step that is being written is written once
                self._catching_up.cancel()
        for id in list(self._late):
            await self._before_change(id)

    async def _catch_up(self) -> None:
        """Write all that is late, as soon as the disk takes it."""
        while self._late:
            id = next(iter(self._late))
            try:
                await self._retries.run("progress of jobs", partial(self._write_late, id, self._registry))
            except (WrongJobState, JobNotFound):  # the job was deleted meanwhile
                self._late.pop(id, None)
            self.announce(id)

    async def _before_change(self, id: str) -> None:
        """Write a job's late progress before a change of its state, with the space that is kept back."""
        try:
            await self._write_late(id, self._registry.with_reserve)
        except StorageError as error:
            log.warning("job %s: its last steps are written later: %s", id, error.message)
        except CoserveError:
            self._late.pop(id, None)

    async def _write_late(self, id: str, write: Writing) -> None:
        async with self._one_at_a_time:
            while waiting := self._late.get(id):
                await self._record(waiting[0], write)
                waiting.popleft()
            self._late.pop(id, None)

    async def _record(self, message: Progress, write: Writing) -> None:
        match message:
            case JobProgress(id=id, metrics=metrics):
                await write(lambda registry: registry.record_step(id, metrics))
                self._metrics.step(metrics.tokens)
            case JobCheckpoint(id=id, step=step):
                await write(lambda registry: registry.record_checkpoint(id, step))
                self.deaths.pop(id, None)

    async def insist(self, write: Callable[[], Awaitable[T]], what: str) -> T:
        """Write what must not be lost, again and again while the machine refuses it."""
        return await self._retries.run(what, write)

    async def _apply(self, message: JobMessage) -> None:
        id = message.id
        match message:
            case JobStarted(total_steps=total, resumed_from=step):
                await self._registry.with_reserve(lambda registry: registry.record_start(id, total, step))
            case JobProgress() | JobCheckpoint():
                await self._record(message, self._registry)
            case JobPaused():
                await self._registry.with_reserve(lambda registry: registry.set_state(id, JobState.PAUSED))
            case JobWaiting(message=text):
                await self._registry.with_reserve(lambda registry: registry.record_waiting(id, text))
            case JobSucceeded():
                await self._succeed(message)
            case JobFailed(code=code, message=text):
                error = ErrorInfo(code=code, message=text)
                await self.end(id, lambda registry: registry.set_state(id, JobState.FAILED, error=error))
            case JobCancelled():
                await self.end(id, lambda registry: registry.set_state(id, JobState.CANCELLED))

    async def _succeed(self, message: JobSucceeded) -> None:
        """Commit the adapter and the job's end together; files that cannot be read back fail the job."""
        id, path, spec = message.id, self._folder.adapter(message.ref), self._engine.spec
        describe = partial(record_adapter, path, message.ref, spec, source=f"job:{id}", created_at=self._clock())
        try:
            record = await asyncio.to_thread(describe)
        except AdapterError as error:
            info = ErrorInfo(code=error.code, message=error.message)
            await self.end(id, lambda registry: registry.set_state(id, JobState.FAILED, error=info))
        else:
            await self.end(id, lambda registry: registry.succeed(id, record))

    async def end(self, id: str, change: Callable[[Registry], JobRecord]) -> JobRecord:
        """Commit a job's end; then its corpus and its checkpoints go. Once it is committed nothing is raised: another
        attempt would find the job ended."""
        record = await self._registry.with_reserve(change)
        self.deaths.pop(id, None)
        self._metrics.job_ended(record.state)
        if record.state is not JobState.FAILED:
            try:
                await asyncio.to_thread(remove_dir, self._folder.job(id))
            except (OSError, CoserveError) as error:
                log.warning("job %s: its files stay: %s", id, error)
        return record

    async def _contradict(self, message: JobMessage, error: CoserveError) -> None:
        """The engine runs what the registry says is over: it is told so, and what it published goes. Raises nothing."""
        log.warning("job %s: %s refused: %s", message.id, type(message).__name__, error.message)
        try:
            record = await self.insist(lambda: self._find(message.id), f"job {message.id}")
            if isinstance(message, JobSucceeded):
                if record is not None and record.result == message.ref:
                    return  # it is this adapter's own job: the message came twice
                with suppress(EngineUnavailable):
                    self._engine.send(DropAdapter(ref=message.ref))
                await asyncio.to_thread(remove_dir, self._folder.adapter(message.ref))
            elif record is None or record.state.terminal:
                with suppress(EngineUnavailable):
                    self._engine.send(CancelJob(id=message.id))
        except (OSError, CoserveError) as problem:
            log.warning("job %s: files of its adapter stay until the next start: %s", message.id, problem)

    async def _find(self, id: str) -> JobRecord | None:
        try:
            return await self._registry(lambda registry: registry.job(id))
        except JobNotFound:
            return None

    # ---- who watches

    @contextmanager
    def watch(self, job: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever something about the job is new on disk."""
        event = asyncio.Event()
        self._watchers.setdefault(job, set()).add(event)
        try:
            yield event
        finally:
            watchers = self._watchers[job]
            watchers.discard(event)
            if not watchers:
                del self._watchers[job]

    def announce(self, job: str) -> None:
        for event in self._watchers.get(job, ()):
            event.set()

    def announce_all(self) -> None:
        for job in self._watchers:
            self.announce(job)
