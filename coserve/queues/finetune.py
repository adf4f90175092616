"""The fine-tuning queue: which job trains next. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class JobQueue:
    """The ready jobs, in the order in which they train. `rotate` is called when a job's micro-batch ends, `put_first`
    when it is suspended. So at most one micro-batch is suspended at a time: the first job's, which the jobs behind it
    may share.
    """

    def __init__(self, number: Callable[[str], int] | None = None) -> None:
        """`number` returns a job's place in a fixed order: a job then trains while it is the first ready one. None:
        round robin."""
        self._number = number
        self._ready: dict[str, None] = {}  # an ordered set
        self._suspended: tuple[str, ...] = ()
        """The jobs that `put_first` moved, until one of them rotates."""

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, job: str) -> bool:
        return job in self._ready

    def add(self, job: str) -> None:
        """Append a job, or insert it at its place of a fixed order."""
        assert job not in self, job
        self._ready[job] = None
        if self._number is not None:
            others = [each for each in self._ready if each not in self._suspended]
            first = [each for each in self._suspended if each in self._ready]
            self._ready = dict.fromkeys((*first, *sorted(others, key=self._number)))

    def remove(self, job: str) -> None:
        """Remove a job that ended or was paused."""
        assert job in self, job
        del self._ready[job]

    def rotate(self, job: str) -> None:
        """Move a job behind all others, or back to its place of a fixed order."""
        self._suspended = tuple(each for each in self._suspended if each != job)
        self.remove(job)
        self.add(job)

    def put_first(self, jobs: Sequence[str]) -> None:
        """Move jobs ahead of all others, in this order."""
        first = self._suspended = tuple(jobs)
        if self.ready()[: len(first)] != first:
            self._ready = dict.fromkeys((*first, *self._ready))

    def ready(self) -> tuple[str, ...]:
        """Jobs that can train, the next one first."""
        return tuple(self._ready)
