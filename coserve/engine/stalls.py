"""Measures how long the engine cannot begin a generation step, by cause. Pure: no torch, no IO.

A stall is the time between two moments at which a step can begin, excluding sleep for lack of work. It counts only if a
request waited or ran at its beginning or end. The whole stall is attributed to its longest cause.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coserve.core.link.stats import STALL_BUCKETS, StallCounts
from coserve.core.logs import ThrottledLog

log = logging.getLogger(__name__)

LOOP = "loop"
"""Everything without its own cause: the policy, reports, event-loop callbacks."""
SLEEP = "sleep"
"""Waiting for an event; not part of a stall."""
LOGGED = 0.1
"""Stalls of at least this many seconds are logged."""


class Stalls:
    """Attributes time to causes. `clock` returns seconds. Not thread-safe. Sections may nest: time counts for the
    innermost.

    A section may stay open over an `await` only on the task that calls `step_can_begin`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cause = LOOP
        self._since: float | None = None
        """Time up to here is counted; None before the first call."""
        self._seconds_by_cause: dict[str, float] = {}
        """Seconds by cause in the current stall."""
        self._had_requests = False
        self._counts = defaultdict[str, list[int]](lambda: [0] * (len(STALL_BUCKETS) + 1))
        self._seconds = defaultdict[str, float](float)
        self._logs: dict[str, ThrottledLog] = {}

    def step_can_begin(self, *, has_requests: bool) -> None:
        """End a stall and begin the next. `has_requests`: a request waits or runs."""
        cause = self._switch(LOOP)
        assert cause == LOOP, f"expected no open section, got {cause}"
        self._seconds_by_cause.pop(SLEEP, None)
        if (has_requests or self._had_requests) and self._seconds_by_cause:
            self._record(self._seconds_by_cause)
        self._seconds_by_cause, self._had_requests = {}, has_requests

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Context whose time counts for `cause`."""
        outer = self._switch(cause)
        try:
            yield
        finally:
            self._switch(outer)

    def totals(self) -> tuple[StallCounts, ...]:
        """Counts since the start, by cause."""
        return tuple(
            StallCounts(cause=cause, seconds=self._seconds[cause], buckets=tuple(counts))
            for cause, counts in self._counts.items()
        )

    def _switch(self, cause: str) -> str:
        """Count the time since the last call for the previous cause, which is returned; then continue with `cause`."""
        now, before = self._clock(), self._cause
        if self._since is not None:
            self._seconds_by_cause[before] = self._seconds_by_cause.get(before, 0.0) + now - self._since
        self._since, self._cause = now, cause
        return before

    def _record(self, by_cause: dict[str, float]) -> None:
        seconds = sum(by_cause.values())
        cause = max(by_cause, key=by_cause.__getitem__)
        self._counts[cause][bisect_left(STALL_BUCKETS, seconds)] += 1
        self._seconds[cause] += seconds
        if seconds >= LOGGED:
            self._log(cause, seconds, by_cause)

    def _log(self, cause: str, seconds: float, by_cause: dict[str, float]) -> None:
        throttled = self._logs.get(cause)
        if throttled is None:
            throttled = self._logs[cause] = ThrottledLog(log, f"a generation step was held up by {cause}", self._clock)
        parts = sorted(((s, name) for name, s in by_cause.items() if s >= 0.001), reverse=True)
        shown = ", ".join(f"{name} {1000 * s:.0f} ms" for s, name in parts)
        throttled.warn(f", {1000 * seconds:.0f} ms: {shown}")
