"""The engine's recent reports, for the web page's charts over time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from coserve.core.gpu_memory import USES
from coserve.core.link.stats import EngineStats
from coserve.core.schemas.service import History, HistoryPoint

POINTS = 900
SPACING = 1.0
"""Seconds: of three reports within this time, only the first and the last are kept. The engine also reports after every
change of state."""


class ReportHistory:
    """A ring of the last `POINTS` reports, in memory only. `clock` returns Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._points: deque[HistoryPoint] = deque(maxlen=POINTS)

    def report(self, stats: EngineStats, jobs: int) -> None:
        """Add a report, with the number of unfinished jobs. It replaces the last one if the one before that is less
        than `SPACING` seconds old. Points of the future, from before the clock was set back, are dropped."""
        use = stats.memory
        point = HistoryPoint(
            at=self._clock(),
            waiting=stats.waiting,
            running=stats.running,
            jobs=jobs,
            generation_steps=sum(each.count for each in stats.steps),
            training_batches=stats.batches.count,
            serve_seconds=stats.serve_seconds,
            train_seconds=stats.train_seconds,
            pages_used=stats.pages_used,
            pages_adapters=stats.pages_adapters,
            pages_total=stats.pages_total,
            memory={} if use is None else {name: getattr(use, name) for name in USES},
        )
        while self._points and self._points[-1].at > point.at:  # the system clock was set back
            self._points.pop()
        if len(self._points) > 1 and point.at - self._points[-2].at < SPACING:
            self._points.pop()
        self._points.append(point)

    def after(self, at: float) -> History:
        """Return the points that are newer than `at`, in Unix seconds, oldest first."""
        return History(data=[point for point in self._points if point.at > at], now=self._clock())
