"""When the SDK retries, and after how long."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from coserve.client.transport import Request
from coserve.core.errors import CapacityError, CoserveError, Unreachable


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with jitter; times in seconds. `attempts` includes the first one; 1: never retry.

    A response of 429 or 503 is a refusal and may always be retried, after at least its `Retry-After`; one that names
    more than `longest_wait` is final. If the connection broke after the request was sent, it is unknown what the daemon
    did. Then only a repeatable request is retried: a GET, one with an `Idempotency-Key`, or a generation whose answer
    had not begun (it ended with the connection).
    """

    attempts: int = 5
    first: float = 0.5
    longest: float = 8.0
    longest_wait: float = 60.0
    reconnects: int = 30
    """Consecutive attempts to reconnect to a job's events."""
    on_wait: Callable[[CoserveError, float], None] | None = None
    """Called before each wait with the error and the seconds, on the client's own thread."""

    def delay(self, attempt: int, error: CoserveError, rng: random.Random) -> float:
        """Return seconds between attempt `attempt`, counted from 1, and the next: a random 50% to 100% of the back-off,
        or slightly more than the daemon's `Retry-After`, so that refused clients do not all return at once."""
        back_off = min(self.longest, self.first * 2.0 ** min(attempt - 1, 30)) * rng.uniform(0.5, 1)
        asked = _asked(error)
        return asked + back_off / 4 if asked > back_off else back_off

    def allows(self, error: CoserveError, request: Request) -> bool:
        """Return whether a retry is safe and useful."""
        if isinstance(error, Unreachable):
            return request.repeatable or not error.sent
        return error.status in (429, 503) and _asked(error) <= self.longest_wait


def _asked(error: CoserveError) -> float:
    return error.retry_after if isinstance(error, CapacityError) else 0.0
