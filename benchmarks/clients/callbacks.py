"""How long each callback keeps an event loop, without the time in which its thread waits for a processor."""

from __future__ import annotations

import time
from asyncio import Handle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch


@contextmanager
def measured_callbacks(least: float) -> Iterator[list[dict[str, object]]]:
    """Appends each callback that keeps an event loop of this process for `least` seconds or more: `what` it is, with
    the request if it is one's, its `cpu` time, and the time that it `waited` for a file, a lock or another thread
    (too little, even below 0, if the thread lost its processor between two readings of the clocks)."""
    run: Callable[[Handle], None] = vars(Handle)["_run"]
    found = list[dict[str, object]]()

    def measured(handle: Handle) -> None:
        what = handle._callback  # type: ignore[attr-defined] # it forgets this when it is cancelled
        frame = getattr(getattr(getattr(what, "__self__", None), "get_coro", object)(), "cr_frame", None)
        request = frame.f_locals.get("request") if frame else None  # of aiohttp
        cpu, delay, wall = time.thread_time(), _run_delay(), time.perf_counter()
        run(handle)
        wall, delay, cpu = time.perf_counter() - wall, _run_delay() - delay, time.thread_time() - cpu
        waited = wall - cpu - delay
        if max(cpu, waited) >= least:
            named = repr(request) if request is not None else getattr(what, "__qualname__", type(what).__name__)
            found.append({"what": named, "cpu": round(cpu, 4), "waited": round(waited, 4)})

    with patch.object(Handle, "_run", measured):
        yield found


def _run_delay() -> float:
    """Seconds in which this thread was ready to run and waited for a processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
