"""How long the engine goes without a chance to begin a generation step, by cause. Pure: no torch, no IO.

A stall is the time between two chances, less the time that the engine slept because there was nothing to do. It counts
only if a request waited or ran at its beginning or at its end. It is filed whole under the cause that took most of it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable

from coserve.link import STALL_BUCKETS, StallCounts
from coserve.logs.throttled import ThrottledLog

log = logging.getLogger(__name__)

LOOP = "loop"
"""All that has no cause of its own: the policy, reports, callbacks of the event loop."""
SLEEP = "sleep"
"""Waiting for an event: no part of a stall."""
LOGGED = 0.1
"""Seconds from which on a stall is logged."""


class Stalls:
    """`clock` gives seconds. One thread; parts may nest, and then the inner one has its time for itself.

    A part may stay open over an `await` only on the task that calls `chance`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._parts: dict[str, _Part] = {}
        self._here = LOOP
        self._since: float | None = None
        """Up to here all time is shared out; None before the first chance."""
        self._shares: dict[str, float] = {}
        self._somebody = False
        self._counts: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}
        self._logs: dict[str, ThrottledLog] = {}

    def chance(self, *, somebody: bool) -> None:
        """A generation step can begin now. `somebody`: a request waits or runs."""
        here = self._share(LOOP)
        assert here == LOOP, f"expected no open part, got {here}"
        self._shares.pop(SLEEP, None)
        if (somebody or self._somebody) and self._shares:
            self._record(self._shares)
        self._shares, self._somebody = {}, somebody

    def during(self, cause: str) -> _Part:
        """A context manager: what runs inside is the cause."""
        part = self._parts.get(cause)
        if part is None:
            part = self._parts[cause] = _Part(self._share, cause)
        return part

    def totals(self) -> tuple[StallCounts, ...]:
        """Counts since the start, by cause."""
        return tuple(
            StallCounts(cause=cause, seconds=self._seconds[cause], buckets=tuple(counts))
            for cause, counts in self._counts.items()
        )

    def _share(self, now_in: str) -> str:
        """The time since the last call belongs to the innermost open part, which it returns; `now_in` is that from now on."""
        now, here = self._clock(), self._here
        if self._since is not None:
            self._shares[here] = self._shares.get(here, 0.0) + now - self._since
        self._since, self._here = now, now_in
        return here

    def _record(self, shares: dict[str, float]) -> None:
        seconds = sum(shares.values())
        cause = max(shares, key=shares.__getitem__)
        counts = self._counts.get(cause)
        if counts is None:
            counts = self._counts[cause] = [0] * (len(STALL_BUCKETS) + 1)
            self._seconds[cause] = 0.0
        counts[bisect_left(STALL_BUCKETS, seconds)] += 1
        self._seconds[cause] += seconds
        if seconds >= LOGGED:
            self._log(cause, seconds, shares)

    def _log(self, cause: str, seconds: float, shares: dict[str, float]) -> None:
        throttled = self._logs.get(cause)
        if throttled is None:
            throttled = self._logs[cause] = ThrottledLog(log, f"a generation step was held up by {cause}", self._clock)
        parts = sorted(((s, name) for name, s in shares.items() if s >= 0.001), reverse=True)
        shown = ", ".join(f"{name} {1000 * s:.0f} ms" for s, name in parts)
        throttled.warn(f", {1000 * seconds:.0f} ms: {shown}")


class _Part:
    """See `Stalls.during`. Reusable and re-entrant."""

    __slots__ = ("_around", "_cause", "_share")

    def __init__(self, share: Callable[[str], str], cause: str) -> None:
        self._share, self._cause, self._around = share, cause, list[str]()

    def __enter__(self) -> None:
        self._around.append(self._share(self._cause))

    def __exit__(self, *_: object) -> None:
        self._share(self._around.pop())
