"""Schedules and times the reads of adapters: few run at once, and those that requests wait for go first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from coserve.core.training.step_metrics import LOAD_CAUSES, LoadSeconds
from coserve.lora.store.entry import Entry


class LoadTimes:
    """Seconds and numbers of loads by phase, counted on any thread."""

    def __init__(self) -> None:
        self._lock, self._counts, self._seconds = Lock(), dict.fromkeys(LOAD_CAUSES, 0), dict.fromkeys(LOAD_CAUSES, 0.0)

    def add(self, cause: str, seconds: float) -> None:
        with self._lock:
            self._counts[cause] += 1
            self._seconds[cause] += seconds

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Count the block's time, also if it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(cause, time.perf_counter() - began)

    def totals(self) -> tuple[LoadSeconds, ...]:
        with self._lock:
            return tuple(LoadSeconds(cause, self._counts[cause], self._seconds[cause]) for cause in LOAD_CAUSES)


class ReadTurns:
    """At most `most` reads at a time. Reads that a request awaits go before prefetches."""

    def __init__(self, most: int) -> None:
        self._free, self._waiting = most, dict[Entry, asyncio.Future[None]]()

    def __len__(self) -> int:
        """Reads that wait for a turn."""
        return len(self._waiting)

    async def take(self, entry: Entry) -> None:
        """Wait for a turn to read this entry's files; `give_back` ends it."""
        if self._free:
            self._free -= 1
            return
        self._waiting[entry] = turn = asyncio.get_running_loop().create_future()
        await turn

    def give_back(self) -> None:
        awaited = (entry for entry in self._waiting if entry.waiting)
        entry = next(awaited, next(iter(self._waiting), None))
        if entry is None:
            self._free += 1
        elif not (turn := self._waiting.pop(entry)).done():  # else the store was closed
            turn.set_result(None)
