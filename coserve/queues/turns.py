"""Counts of inference batches and fine-tuning turns, for the policy. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from collections.abc import Callable

from coserve.queues.policy import Turn


class Turns:
    def __init__(self) -> None:
        self._job: str | None = None
        self._since_job = self._since_micro_batch = 0

    def dispatched(self) -> None:
        """Count an inference batch."""
        self._since_job += 1
        self._since_micro_batch += 1

    def trained(self, job: str, *, suspended: bool) -> None:
        """A slice of the job ended; `suspended`: in the middle of a micro-batch."""
        self._job = job
        if not suspended:
            self._since_micro_batch = 0

    def view(self, in_training: Callable[[str], bool]) -> Turn:
        """`in_training`: whether a job has neither ended nor been paused, and does not wait for requests."""
        if self._job is not None and not in_training(self._job):
            self._job, self._since_job = None, 0
        return Turn(self._job, self._since_job, self._since_micro_batch)
