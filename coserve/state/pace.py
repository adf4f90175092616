"""How long a job still takes, by the wall clock. Pure."""

from __future__ import annotations

from coserve.core.types import Wire

WINDOW = 20
"""Steps that the mean is about."""


class Pace(Wire, frozen=True):
    """The mean seconds of a job's recent steps by the wall clock: requests and other jobs, for which it waits, count.
    Time in which it does not run, since it is paused or its engine has died, does not.
    """

    at: float
    """When its last step ended, or when it began or went on: seconds since the epoch."""
    seconds: float = 0.0
    intervals: int = 0
    """How many `seconds` is the mean of, at most `WINDOW + 1`. The first one, in which kernels may be compiled, counts
    until the second."""

    def step(self, now: float) -> Pace:
        """One step more is done."""
        intervals = min(self.intervals + 1, WINDOW + 1)
        change = max(0.0, now - self.at) - self.seconds
        return Pace(now, self.seconds + change / max(1, intervals - 1), intervals)

    def left(self, steps: int) -> float | None:
        """Seconds that `steps` steps take; None before the first step."""
        return max(0, steps) * self.seconds if self.intervals else None
