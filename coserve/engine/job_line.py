"""The jobs of an engine that wait for a place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from coserve.types import JobSpec

WAITS_FOR_KERNELS = "jobs: some start once their kernels are compiled"


class JobLine:
    """First come, first served, but jobs whose kernels are not there yet let others pass."""

    def __init__(self, may_start: Callable[[JobSpec], bool], withdrawn: Callable[[str], None]) -> None:
        """`may_start`: whether a job's kernels are there. `withdrawn` is told of jobs that leave without a place."""
        self._may_start, self._withdrawn = may_start, withdrawn
        self._jobs: deque[JobSpec] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, spec: JobSpec) -> None:
        self._jobs.append(spec)

    def remove(self, spec: JobSpec) -> None:
        self._jobs.remove(spec)

    def withdraw(self, job: str) -> JobSpec | None:
        """Take out a job that ends or is paused; None if it is not in line."""
        found = next((spec for spec in self._jobs if spec.id == job), None)
        if found is not None:
            self._jobs.remove(found)
            self._withdrawn(job)
        return found

    def first(self) -> JobSpec | None:
        """The first job whose kernels are there."""
        return next(filter(self._may_start, self._jobs), None)

    @property
    def notes(self) -> tuple[str, ...]:
        """For /health."""
        return () if all(map(self._may_start, self._jobs)) else (WAITS_FOR_KERNELS,)
