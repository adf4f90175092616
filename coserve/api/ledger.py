"""What the engine says of jobs, written into the registry in order; announced only once it is on disk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from coserve.adapters.peft import inspect_adapter
from coserve.api.connection import Connection
from coserve.api.metrics import Metrics
from coserve.errors import (
    AdapterError,
    CoserveError,
    EngineUnavailable,
    JobNotFound,
    StorageFailed,
    StorageFull,
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
)
from coserve.schemas import ErrorInfo
from coserve.state.durable import remove_dir
from coserve.state.folder import DataFolder
from coserve.state.records import AdapterRecord
from coserve.state.registry import Registry
from coserve.state.thread import RegistryThread
from coserve.types import BaseSpec, JobState

log = logging.getLogger(__name__)

JobMessage = JobStarted | JobPaused | JobProgress | JobCheckpoint | JobSucceeded | JobFailed | JobCancelled

T = TypeVar("T")

MAX_RETRY_DELAY = 30.0


def record_adapter(folder: DataFolder, spec: BaseSpec, message: JobSucceeded, now: float) -> AdapterRecord:
    """The row of an adapter whose files the engine has published. Raises `AdapterError` leaves."""
    info = inspect_adapter(folder.adapter(message.ref), spec)
    return AdapterRecord(
        ref=message.ref,
        rank=info.rank,
        alpha=info.alpha,
        targets=tuple(info.targets),
        base_fingerprint=spec.fingerprint,
        base_name=spec.name,
        source=f"job:{message.id}",
        created_at=now,
        bytes=info.bytes,
        sha256=info.sha256,
    )


class Ledger:
    """Writes the story of jobs and tells who watches. `retry_delay`: seconds before a full disk is tried again."""

    def __init__(
        self,
        folder: DataFolder,
        registry: RegistryThread,
        engine: Connection,
        metrics: Metrics,
        *,
        retry_delay: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._registry, self._engine, self._metrics = folder, registry, engine, metrics
        self._retry_delay, self._clock = retry_delay, clock
        self._inbox: asyncio.Queue[JobMessage] = asyncio.Queue()
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self.deaths: Counter[str] = Counter()
        """Engines that ended while they ran a job, since its last checkpoint."""

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
        """Progress may be lost to a full disk; a change of state is tried again until it is written."""
        if isinstance(message, JobProgress | JobCheckpoint):
            await self._apply(message)
        else:
            await self.insist(lambda: self._apply(message), f"job {message.id}")

    async def insist(self, write: Callable[[], Awaitable[T]], what: str) -> T:
        """Write what must not be lost, again and again while the disk is full."""
        delay = self._retry_delay
        while True:
            try:
                return await write()
            except (StorageFull, StorageFailed) as error:
                log.error("%s: %s; trying again in %.0f s", what, error.message, delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_RETRY_DELAY)

    async def _apply(self, message: JobMessage) -> None:
        id = message.id
        match message:
            case JobStarted(total_steps=total, resumed_from=step):
                await self._registry(lambda registry: registry.record_start(id, total, step))
            case JobProgress(metrics=metrics):
                await self._registry(lambda registry: registry.record_step(id, metrics))
                self._metrics.step(metrics.tokens)
            case JobCheckpoint(step=step):
                await self._registry(lambda registry: registry.record_checkpoint(id, step))
                self.deaths.pop(id, None)
            case JobPaused():
                await self._registry(lambda registry: registry.set_state(id, JobState.PAUSED))
            case JobSucceeded():
                await self._succeed(message)
            case JobFailed(code=code, message=text):
                error = ErrorInfo(code=code, message=text)
                await self.end(id, lambda registry: registry.set_state(id, JobState.FAILED, error=error))
            case JobCancelled():
                await self.end(id, lambda registry: registry.set_state(id, JobState.CANCELLED))

    async def _succeed(self, message: JobSucceeded) -> None:
        """Commit the adapter and the job's end together; files that cannot be read back fail the job."""
        id, now = message.id, self._clock()
        try:
            record = await asyncio.to_thread(record_adapter, self._folder, self._engine.spec, message, now)
        except AdapterError as error:
            info = ErrorInfo(code=error.code, message=error.message)
            await self.end(id, lambda registry: registry.set_state(id, JobState.FAILED, error=info))
        else:
            await self.end(id, lambda registry: registry.succeed(id, record))

    async def end(self, id: str, change: Callable[[Registry], object]) -> None:
        """Commit a job's end; then its corpus and its checkpoints go."""
        await self._registry(change)
        self.deaths.pop(id, None)
        record = await self._registry(lambda registry: registry.job(id))
        self._metrics.job_ended(record.state)
        if record.state is not JobState.FAILED:
            try:
                await asyncio.to_thread(remove_dir, self._folder.job(id))
            except (OSError, CoserveError) as error:
                log.warning("job %s: its files stay: %s", id, error)

    async def _contradict(self, message: JobMessage, error: CoserveError) -> None:
        """The engine runs what the registry says is over: it is told so, and what it published goes."""
        log.warning("job %s: %s refused: %s", message.id, type(message).__name__, error.message)
        with suppress(EngineUnavailable):
            if isinstance(message, JobSucceeded):
                self._engine.send(DropAdapter(ref=message.ref))
                await asyncio.to_thread(remove_dir, self._folder.adapter(message.ref))
            elif await self._is_over(message.id):
                self._engine.send(CancelJob(id=message.id))

    async def _is_over(self, id: str) -> bool:
        try:
            return (await self._registry(lambda registry: registry.job(id))).state.terminal
        except JobNotFound:
            return True

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
