"""A job's remaining time by the wall clock. Pure."""

from __future__ import annotations

from coserve.core.types import Wire

WINDOW = 20
"""Number of recent steps in the mean."""


class Pace(Wire, frozen=True):
    """Mean wall-clock seconds of a job's recent steps. Time that the job waits for requests and other jobs counts. Time
    in which it does not run (paused, or the engine died) does not count."""

    at: float
    """End of its last step, or when it began or resumed: seconds since the epoch."""
    seconds: float = 0.0
    intervals: int = 0
    """Number of steps in the mean, at most `WINDOW + 1`. The first step, which may compile kernels, counts only until
    the second."""

    def step(self, now: float) -> Pace:
        """Return the pace after one more step, which ended `now`."""
        intervals = min(self.intervals + 1, WINDOW + 1)
        change = max(0.0, now - self.at) - self.seconds
        return Pace(now, self.seconds + change / max(1, intervals - 1), intervals)

    def left(self, steps: int) -> float | None:
        """Return the seconds that `steps` steps take; None before the first step."""
        return max(0, steps) * self.seconds if self.intervals else None
