"""The queue of jobs that wait for a place in the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from coserve.core.training.calls import SessionSpec
from coserve.core.training.jobs import JobSpec


class WaitingJobs:
    """Jobs and sessions that wait for a place, first come, first served."""

    def __init__(self, withdrawn: Callable[[str], None]) -> None:
        """`withdrawn` is called with jobs that leave without a place."""
        self._withdrawn = withdrawn
        self._jobs: deque[JobSpec] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, spec: JobSpec) -> None:
        self._jobs.append(spec)

    def remove(self, spec: JobSpec) -> None:
        self._jobs.remove(spec)

    def withdraw(self, job: str) -> JobSpec | None:
        """Remove a job that ends or is paused; None if it is not queued."""
        found = next((spec for spec in self._jobs if spec.id == job), None)
        if found is not None:
            self._jobs.remove(found)
            self._withdrawn(job)
        return found

    def first(self, *, jobs: bool) -> JobSpec | None:
        """Return the next job or session; without `jobs` (no place is free) the next session."""
        return next((spec for spec in self._jobs if jobs or isinstance(spec, SessionSpec)), None)
