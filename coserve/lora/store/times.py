"""Measures the phases of adapter loads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from coserve.core.step_metrics import LOAD_CAUSES, LoadSeconds


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
