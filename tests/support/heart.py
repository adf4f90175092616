"""The beats of an event loop, and the CPU time between them."""

from __future__ import annotations

import asyncio
import time
from asyncio import Handle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

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


@contextmanager
def measured_callbacks(least: float) -> Iterator[list[dict[str, object]]]:
    """Appends each callback that keeps an event loop of this process for `least` seconds or more: `what` it is, its
    `cpu` time, and the time that it `waited` for a file, a lock or another thread; neither has the time in which the
    thread waited for a processor."""
    run: Callable[[Handle], None] = vars(Handle)["_run"]
    found = list[dict[str, object]]()

    def measured(handle: Handle) -> None:
        what = handle._callback  # type: ignore[attr-defined] # it forgets this when it is cancelled
        cpu, delay, wall = time.thread_time(), _run_delay(), time.perf_counter()
        run(handle)
        wall, delay, cpu = time.perf_counter() - wall, _run_delay() - delay, time.thread_time() - cpu
        waited = wall - cpu - delay
        if max(cpu, waited) >= least:
            found.append({"what": repr(getattr(what, "__self__", what))[:500], "cpu": cpu, "waited": waited})

    with patch.object(Handle, "_run", measured):
        yield found


def _run_delay() -> float:
    """Seconds in which this thread was ready to run and waited for a processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
