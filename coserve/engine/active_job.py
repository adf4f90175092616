"""A job that has a place in the engine, and the coroutine that runs it: see `engine.run_job`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from types import coroutine
from typing import Any, TypeVar

from coserve.admission.treatment import Treatment
from coserve.core.link import JobCancelled, JobFailed, JobPaused, JobSucceeded
from coserve.core.types import AdapterRef, JobSpec

T = TypeVar("T")
Awaited = tuple[Future[Any], ...]
"""What a job's coroutine is suspended for: one of them is to be done."""
Running = Coroutine[Awaited, None, None]
Ending = JobPaused | JobCancelled | JobFailed


class Stopped(Exception):
    """The job is to end, or the engine is: see `ActiveJob.stops`."""


@coroutine
def _suspended(futures: Awaited) -> Generator[Awaited, None, None]:
    yield futures


@dataclass(frozen=True)
class Samples:
    """Of a snapshot of the job."""

    snapshot: AdapterRef
    done: Future[None] = field(default_factory=Future)


class ActiveJob:
    """A job that is starting, training or ending. Its coroutine is resumed on the event loop, between two ticks."""

    def __init__(self, spec: JobSpec, run: Callable[[ActiveJob], Running]) -> None:
        """`run` is called at the first `resume`."""
        self.spec = spec
        self.loaded = False
        """Whether the trainer has loaded it."""
        self.turn: Future[None] | None = None
        """Done at the end of a micro-batch; None: it does not train."""
        self.samples: Samples | None = None
        """Those that are being generated; the job trains on until the next ones are due."""
        self.trouble: str | None = None
        """Why the disk refused its adapter; None: it did not."""
        self.treatment: Treatment | None = None
        """How its micro-batches are computed; None: as planned."""
        self.end: Ending | JobSucceeded | None = None
        """The message that ends the job, sent when its coroutine has ended."""
        self.resumes = False
        """Whether it was resumed before its pause had ended."""
        self.closing = False
        """Whether the engine ends."""
        self._running, self._awaited = run(self), tuple[Future[Any], ...]()

    @property
    def stops(self) -> bool:
        return self.closing or self.end is not None

    @property
    def ready(self) -> bool:
        """What the coroutine is suspended for is done."""
        return any(future.done() for future in self._awaited)

    @property
    def waits_for_samples(self) -> bool:
        """Nothing but its samples is missing for its next turn."""
        return self.samples is not None and self._awaited == (self.samples.done,)

    def ends(self, end: Ending) -> None:
        """It is to end so, unless it was cancelled or has failed already."""
        if not isinstance(self.end, JobCancelled | JobFailed):
            self.end, self.resumes = end, False

    def resume(self) -> bool:
        """Run the coroutine until it is suspended again. False: it has ended."""
        self._awaited = ()  # an error in one of them would keep the frames that it has passed
        try:
            self._awaited = self._running.send(None)
        except StopIteration:
            return False
        return True

    def run_to_end(self) -> None:
        """Block until the coroutine has ended. The job stops."""
        self.closing = True
        while self.resume():
            wait(self._awaited, return_when=FIRST_COMPLETED)

    # ---- for the coroutine

    async def until(self, *futures: Future[Any]) -> None:
        """Suspend the coroutine until one of them is done. Raises `Stopped`."""
        while not self.stops and not any(future.done() for future in futures):
            await _suspended(futures)
        if self.stops:
            raise Stopped

    async def result(self, future: Future[T]) -> T:
        """The future's result. The job may stop meanwhile. Raises what the future raises, and `Stopped` if the engine
        has cancelled it."""
        try:
            while not future.done():
                await _suspended((future,))
            if future.cancelled():
                raise Stopped
            return future.result()
        finally:
            del future  # its error would keep this frame, which keeps it
