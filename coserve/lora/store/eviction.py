"""The order in which adapters leave the host: greedy dual, by frequency and size (GDSF, Cherkasova 1998)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIXED_BYTES = 16 << 20
"""Fixed cost of a read, as bytes: its thread, its allocations, its place in a step."""


class GreedyDual(Generic[K]):
    """The least valuable copy leaves first. A copy's value is its uses times its cost per byte, plus the value of the
    last copy that left when it was last used: so one that was popular once leaves in the end. Among equals the one
    that was used longest ago leaves. Each call takes O(log n)."""

    def __init__(self) -> None:
        self._floor = 0.0
        self._uses: dict[K, int] = {}
        self._values: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], K]] = []
        """May have outdated entries: only those that equal `_values` count."""
        self._ticks = count()

    def used(self, key: K, size: int, uses: int = 1) -> None:
        """Count `uses` of a copy of `size` bytes; 0 for one that was only read."""
        self._uses[key] = self._uses.get(key, 0) + uses
        value = self._floor + max(1, self._uses[key]) * (1 + FIXED_BYTES / max(1, size))
        self._values[key] = value, next(self._ticks)
        heappush(self._heap, (self._values[key], key))
        if len(self._heap) > 64 + 4 * len(self._values):
            self._heap = sorted((value, key) for key, value in self._values.items())

    def left(self, key: K) -> None:
        """Forget a copy."""
        self._uses.pop(key, None)
        self._values.pop(key, None)

    def pop(self, may_leave: Callable[[K], bool]) -> K | None:
        """Forget and return the least valuable copy that may leave; None: there is none."""
        kept, found = list[tuple[tuple[float, int], K]](), None
        while self._heap and found is None:
            entry = heappop(self._heap)
            if self._values.get(entry[1]) != entry[0]:
                continue
            if may_leave(entry[1]):
                found = entry[1]
                self._floor = entry[0][0]
                self.left(found)
            else:
                kept.append(entry)
        for entry in kept:
            heappush(self._heap, entry)
        return found
