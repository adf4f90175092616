"""How long a job still takes, from the events of its story. Pure."""

from __future__ import annotations

from collections import deque

from coserve.schemas import JobEvent

WINDOW = 20
"""Steps that the pace is taken from."""


class Pace:
    """Seconds a step, by the times at which the daemon noted the steps: not by when this process heard of them (a story is
    told from its start, all at once), and never across a pause, a crash or a step that was repeated after one.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=WINDOW + 1)
        self._total = 0

    def see(self, event: JobEvent) -> None:
        """Take note of an event, in the order of the story."""
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
