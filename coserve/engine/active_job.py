"""The engine's state of an active job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from coserve.admission.treatment import Treatment
from coserve.cancellation import Cancellation
from coserve.link import FromEngine, JobCancelled, JobFailed, JobPaused
from coserve.types import AdapterRef, JobSpec

Commit = Callable[[], FromEngine | None]
"""The result of a thread's work. Called on the event loop, it commits the work and returns the message to send."""


@dataclass(frozen=True)
class ThreadWork:
    """Work of a job on a thread. The job does not train meanwhile."""

    future: Future[Commit]
    cancellation: Cancellation | None
    """None for work that writes files: it is not cancelled, and the job ends after it."""


@dataclass
class Retry:
    """Retries of a publication that the disk refused: `delays` in seconds, `timer` of the next attempt."""

    delays: Iterator[float]
    message: str
    timer: asyncio.TimerHandle | None = None


@dataclass
class ActiveJob:
    """A job that is starting, training or ending."""

    spec: JobSpec
    loaded: bool = False
    """Whether the trainer has loaded it."""
    work: ThreadWork | None = None
    """Its start, the preparation of an optimizer step, its publication, or its checkpoint at a pause."""
    cancelled: Future[Commit] | None = None
    """Work that nobody waits for any more, which may hold memory until its thread has ended it."""
    write: Future[Commit] | None = None
    """A checkpoint that is being written while the job trains, or a snapshot that is being copied."""
    snapshot: AdapterRef | None = None
    """The snapshot of which samples are being generated. The job trains on until the next one is due."""
    retry: Retry | None = None
    end: JobPaused | JobCancelled | JobFailed | None = None
    """The message that ends the job, sent when none of its files is being written."""
    treatment: Treatment | None = None
    """How its micro-batches are computed; None: as planned."""
    waits_for_pass: bool = False
    """Its start found no memory, and is tried again, once, when the pass that is suspended has ended."""
    waited_for_pass: bool = False
    saved_at_end: bool = False
    """Whether saving its state at a pause was tried."""
    resumes: bool = False
    """Whether it was resumed before its pause had ended."""

    @property
    def waits_for_samples(self) -> bool:
        """If it has no turns: nothing but its samples is missing for them."""
        return self.snapshot is not None and self.work is None and self.write is None

    @property
    def timer(self) -> asyncio.TimerHandle | None:
        """Of the next attempt to publish it."""
        return None if self.retry is None else self.retry.timer

    def cancel_timer(self) -> None:
        """There is no next attempt."""
        if self.timer is not None:
            self.timer.cancel()

    def cancel_work(self) -> bool:
        """Nobody waits any more for its start or preparation. False: there is none."""
        cancellation = None if self.work is None else self.work.cancellation
        if cancellation is not None:
            cancellation.cancel()
        return cancellation is not None
