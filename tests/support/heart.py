"""The beats of an event loop, and the CPU time between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BEAT = 0.002
"""Seconds between heartbeats."""


class Heart:
    """Beats on the running loop. `longest`: most CPU seconds between two beats, by `clock`."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        """`clock`: CPU seconds of the process (also of threads that hold the interpreter's lock) or of the loop's
        thread alone (`time.thread_time`), on a machine where threads wait for a processor."""
        self._loop, self._clock = asyncio.get_running_loop(), clock
        self._last = clock()
        self.longest = 0.0
        self._beat()

    def _beat(self) -> None:
        now = self._clock()
        self.longest = max(self.longest, now - self._last)
        self._last = now
        self._loop.call_later(BEAT, self._beat)

    def take(self) -> dict[str, float]:
        """The longest gap, and the machine's slowness; begin anew."""
        found = {"longest": self.longest, "slow": slowness()}
        self._last, self.longest = self._clock(), 0.0
        return found


def slowness() -> float:
    """How many times slower this machine is now than one of 2020, on which this work takes about 10 ms of CPU."""
    began = time.process_time()
    sum(number * number for number in range(120_000))
    return max(1.0, (time.process_time() - began) / 0.010)
