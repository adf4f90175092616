"""Quantiles of the latest values. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque


class SlidingQuantile:
    """Mean and quantiles over the latest `size` values."""

    def __init__(self, size: int) -> None:
        assert size >= 1, size
        self._size = size
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._sum = 0.0

    def __len__(self) -> int:
        return len(self._latest)

    @property
    def mean(self) -> float:
        """Mean of the values, at least one."""
        return self._sum / len(self._latest)

    def add(self, value: float) -> None:
        self._latest.append(value)
        self._sum += value
        insort(self._sorted, value)
        if len(self._latest) > self._size:
            oldest = self._latest.popleft()
            self._sum -= oldest
            del self._sorted[bisect_left(self._sorted, oldest)]

    def at(self, share: float) -> float:
        """The `share` quantile: the least value that at least this fraction does not exceed; 0 without values."""
        if not self._sorted:
            return 0.0
        return self._sorted[max(1, math.ceil(len(self._sorted) * share - 1e-9)) - 1]

    def largest_below(self, bound: float, *, rank: int) -> float | None:
        """The largest value below `bound` (`rank` 1), the second largest (2), ...; None if there are fewer."""
        count = bisect_left(self._sorted, bound)
        return self._sorted[count - rank] if count >= rank else None
