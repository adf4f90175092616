"""The fine-tuning queue: which job trains next. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from collections.abc import Sequence


class JobQueue:
    """Round robin among the ready jobs. `rotate` is called when a job's micro-batch ends, `put_first` when it is
    suspended. So at most one micro-batch is suspended at a time: the first job's, which the jobs behind it may share.
    """

    def __init__(self) -> None:
        self._ready: dict[str, None] = {}  # an ordered set
        self._order: tuple[str, ...] | None = None
        """Cached `ready()`; None after a change."""

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, job: str) -> bool:
        return job in self._ready

    def add(self, job: str) -> None:
        """Append a job."""
        assert job not in self, job
        self._ready[job] = None
        self._order = None

    def remove(self, job: str) -> None:
        """Remove a job that ended or was paused."""
        assert job in self, job
        del self._ready[job]
        self._order = None

    def rotate(self, job: str) -> None:
        """Move a job behind all others."""
        self.remove(job)
        self.add(job)

    def put_first(self, jobs: Sequence[str]) -> None:
        """Move jobs ahead of all others, in this order."""
        first = tuple(jobs)
        if self.ready()[: len(first)] != first:
            self._ready = dict.fromkeys((*first, *self._ready))
            self._order = None

    def ready(self) -> tuple[str, ...]:
        """Jobs that can train, the next one first."""
        if self._order is None:
            self._order = tuple(self._ready)
        return self._order
