"""What the engine remembers of a job that has a place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from coserve.cancellation import Cancellation
from coserve.link import FromEngine, JobCancelled, JobCheckpoint, JobFailed, JobPaused
from coserve.types import JobSpec

Commit = Callable[[], FromEngine | None]
"""The end of some work of a thread: call it on the event loop. It returns the message that tells of the work."""


@dataclass(frozen=True)
class ThreadWork:
    """Work of a job on a thread. The job has no turns meanwhile."""

    future: Future[Commit]
    cancellation: Cancellation | None
    """None: it writes files, so the job does not end before it does."""


@dataclass
class Retry:
    """A finished job until the disk takes its files: `delays` in seconds, `timer` of the next attempt."""

    delays: Iterator[float]
    message: str
    timer: asyncio.TimerHandle | None = None


@dataclass
class ActiveJob:
    """A job that starts, trains or ends."""

    spec: JobSpec
    loaded: bool = False
    """The trainer has it in memory."""
    work: ThreadWork | None = None
    """Its start, the preparation of a step, its publication, or its checkpoint at a pause."""
    write: Future[JobCheckpoint | None] | None = None
    """A checkpoint that is being written while it trains."""
    retry: Retry | None = None
    end: JobPaused | JobCancelled | JobFailed | None = None
    """It ends with this message as soon as nothing of it writes files."""
    saved_at_end: bool = False
    """Its state at the pause was saved, or could not be."""
    resumes: bool = False
    """It was resumed before it had paused."""
