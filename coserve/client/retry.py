"""When the SDK tries again, and after how long."""

from __future__ import annotations

import random
from dataclasses import dataclass

from coserve.client.transport import Request
from coserve.core.errors import CapacityError, CoserveError, Unreachable


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with jitter; times in seconds. `attempts` counts the first one; 1: never try again.

    A response of 429 or 503 is a refusal and may always be tried again, after at least the `Retry-After` that it names;
    one that names more than `longest_wait` is final. Where the connection broke after the request was sent, nobody
    knows what the daemon did: only a request that may be repeated is (a GET, one with an `Idempotency-Key`, or a
    generation whose answer had not begun: it ended with the connection).
    """

    attempts: int = 5
    first: float = 0.5
    longest: float = 8.0
    longest_wait: float = 60.0
    reconnects: int = 30
    """Attempts in a row to continue a job's events."""

    def delay(self, attempt: int, error: CoserveError, rng: random.Random) -> float:
        """Seconds between attempt `attempt`, counted from 1, and the next: half to all of the back-off, or a little
        more than the daemon asked for, so that not all who were refused come back at once."""
        back_off = min(self.longest, self.first * 2.0 ** min(attempt - 1, 30)) * rng.uniform(0.5, 1)
        asked = _asked(error)
        return asked + back_off / 4 if asked > back_off else back_off

    def allows(self, error: CoserveError, request: Request) -> bool:
        """Whether another attempt is safe and makes sense."""
        if isinstance(error, Unreachable):
            return request.repeatable or not error.sent
        return error.status in (429, 503) and _asked(error) <= self.longest_wait


def _asked(error: CoserveError) -> float:
    return error.retry_after if isinstance(error, CapacityError) else 0.0
