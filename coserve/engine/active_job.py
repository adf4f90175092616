"""Base of an active job or session: its coroutine, and how it suspends, resumes and ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Generator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from types import coroutine
from typing import Any, TypeVar

from coserve.admission.recompute_plan import RecomputePlan
from coserve.core.link.jobs import JobCancelled, JobFailed, JobPaused, JobSucceeded
from coserve.core.training.jobs import JobSpec
from coserve.core.types import AdapterRef

T = TypeVar("T")
Awaited = tuple[Future[Any], ...]
"""Futures that a job's coroutine waits for; it resumes once one of them is done."""
Ending = JobPaused | JobCancelled | JobFailed


class Stopped(Exception):
    """Raised in the coroutine when the job or the engine is to end: see `ActiveJob.stops`."""


@coroutine
def _suspended(futures: Awaited) -> Generator[Awaited, None, None]:
    yield futures


@dataclass(frozen=True)
class Samples:
    """Samples being generated from a snapshot of the job."""

    snapshot: AdapterRef
    done: Future[None] = field(default_factory=Future)


class ActiveJob(ABC):
    """A job that has a place in the engine: it is starting, training or ending. Its coroutine `run` is resumed on the
    event loop, between two ticks; it starts at the first `resume`."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec, self.id = spec, spec.id
        self.loaded = False
        """Whether the trainer has loaded it."""
        self.turn: Future[None] | None = None
        """Done when the micro-batch that it waits for ends; None: it does not train."""
        self.samples: Samples | None = None
        """Samples being generated. The job trains on until the next ones are due."""
        self.trouble: str | None = None
        """Why the disk refused to write its adapter; None: it did not."""
        self.recompute_plan: RecomputePlan | None = None
        """Recompute plan of its micro-batches; None: as configured."""
        self.end: Ending | JobSucceeded | None = None
        """The message that ends the job, sent when its coroutine has ended."""
        self.resumes = False
        """Whether it was resumed while it was still pausing, so that it goes back into the queue."""
        self.closing = False
        """Whether the engine is ending."""
        self._running: Coroutine[Awaited, None, None] = self.run()
        self._awaited = tuple[Future[Any], ...]()

    @property
    def stops(self) -> bool:
        return self.closing or self.end is not None

    @property
    def ready(self) -> bool:
        """Whether one of the awaited futures is done."""
        return any(future.done() for future in self._awaited)

    @property
    def waits_for_samples(self) -> bool:
        """Whether its samples are all that it waits for before it can train."""
        return self.samples is not None and self._awaited == (self.samples.done,)

    def ends(self, end: Ending) -> None:
        """Set how the job ends, unless it was cancelled or has failed already."""
        if not isinstance(self.end, JobCancelled | JobFailed):
            self.end, self.resumes = end, False

    def resume(self) -> bool:
        """Run the coroutine until it suspends again. Returns False if it has ended."""
        self._awaited = ()  # a failed future's traceback would keep its frames alive
        try:
            self._awaited = self._running.send(None)
        except StopIteration:
            return False
        return True

    def run_to_end(self) -> None:
        """Stop the job, and block until its coroutine has ended."""
        self.closing = True
        while self.resume():
            wait(self._awaited, return_when=FIRST_COMPLETED)

    # ---- the coroutine

    @abstractmethod
    async def run(self) -> None:
        """Live from the start to the end, and set `end` unless the engine ends first. Raises only `EngineFault`."""

    async def until(self, *futures: Future[Any]) -> None:
        """Suspend the coroutine until one of the futures is done. Raises `Stopped`."""
        while not self.stops and not any(future.done() for future in futures):
            await _suspended(futures)
        if self.stops:
            raise Stopped

    async def result(self, future: Future[T]) -> T:
        """Wait for the future's result, even if the job stops meanwhile. Raises the future's error, and `Stopped` if
        the engine has cancelled it."""
        try:
            while not future.done():
                await _suspended((future,))
            if future.cancelled():
                raise Stopped
            return future.result()
        finally:
            del future  # breaks the cycle of this frame and the error's traceback
