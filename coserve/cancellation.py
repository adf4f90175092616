"""Cancellation of work on a thread, which also releases the interpreter's lock (GIL) to the engine's tick. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HOLD, REST = 0.001, 0.002
"""Seconds: a thread computes in Python for `HOLD`, then sleeps for `REST`. A tick acquires the GIL hundreds of times; without
the sleeps, each time would take one of the interpreter's switch intervals."""


class Cancelled(Exception):
    """The work's result is no longer needed."""


class Cancellation:
    """A flag that the work checks. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._cancelled, self._clock, self._since = threading.Event(), clock, clock()
        self._lock, self._calls = threading.Lock(), list[Callable[[], None]]()

    def cancel(self) -> None:
        """End the work at its next `check`. May be called on any thread, also when the work has ended and its result is not used."""
        with self._lock:
            self._cancelled.set()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def on_cancel(self, call: Callable[[], None]) -> None:
        """`cancel` calls it once, on its own thread. Raises `Cancelled` if the work is cancelled already."""
        with self.postponed():
            self._calls.append(call)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """`cancel` waits while inside. Raises `Cancelled` if the work is cancelled already."""
        with self._lock:
            if self._cancelled.is_set():
                raise Cancelled
            yield

    def check(self) -> None:
        """Called on the working thread, at least once in a millisecond of computing. Raises `Cancelled`."""
        if self._clock() - self._since > HOLD:
            self._cancelled.wait(REST)
            self._since = self._clock()
        if self._cancelled.is_set():
            raise Cancelled

    def wait(self, seconds: float) -> None:
        """Sleep on the working thread. Raises `Cancelled` as soon as the work is cancelled."""
        if self._cancelled.wait(seconds):
            raise Cancelled


def unchecked() -> None:
    """The `check` of work that is never cancelled."""
