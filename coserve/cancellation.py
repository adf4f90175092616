"""Work on a thread beside the tick: it can be cancelled, and leaves the interpreter's lock to the tick. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HOLD, REST = 0.001, 0.002
"""Seconds: a thread that computes in Python holds the lock for the first, and then stays away for the second. A tick asks
for the lock hundreds of times; without the rests each time would cost it an interval of the interpreter's own switching."""


class Cancelled(Exception):
    """Nobody waits for the work any more."""


class Cancellation:
    """Asked between the pieces of some work. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._cancelled, self._clock, self._since = threading.Event(), clock, clock()

    def cancel(self) -> None:
        """On any thread: the work ends at its next `check`."""
        self._cancelled.set()

    def check(self) -> None:
        """On the thread that works, at least once a millisecond of its own computing. Raises `Cancelled`."""
        if self._clock() - self._since > HOLD:
            self._cancelled.wait(REST)
            self._since = self._clock()
        if self._cancelled.is_set():
            raise Cancelled

    def wait(self, seconds: float) -> None:
        """On the thread that works: pause. Raises `Cancelled`, at once where that comes meanwhile."""
        if self._cancelled.wait(seconds):
            raise Cancelled


def unchecked() -> None:
    """The `check` of work that nobody cancels."""
