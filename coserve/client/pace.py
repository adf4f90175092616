"""Estimates how long a job still takes, from its events. Pure."""

from __future__ import annotations

from collections import deque

from coserve.schemas import JobEvent

WINDOW = 20
"""Steps that the estimate uses."""


class Pace:
    """Seconds per step, by the daemon's times of the steps, not by when this process received them: past events arrive all
    at once. Never across a pause, a crash, or a step repeated after one.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=WINDOW + 1)
        self._total = 0

    def add(self, event: JobEvent) -> None:
        """Add the job's next event."""
        if event.metrics is None:
            if event.state is not None:
                self._steps.clear()
            return
        if self._steps and event.metrics.step <= self._steps[-1][1]:
            self._steps.clear()
        self._steps.append((event.created_at, event.metrics.step))
        self._total = event.metrics.total_steps

    @property
    def left(self) -> float | None:
        """Seconds of wall-clock time until the last step; None before two steps in a row."""
        if len(self._steps) < 2:
            return None
        (since, first), (until, last) = self._steps[0], self._steps[-1]
        return max(0.0, until - since) / (last - first) * max(0, self._total - last)
