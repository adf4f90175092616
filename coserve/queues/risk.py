"""How far predictions are wrong, as a quantile of what was measured. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

WINDOW = 1024
"""Latest errors that the quantile is taken from; more for an attainment above 99.9%."""
FIRST_GUESS = 1.25
"""Least factor while there are too few errors for the quantile."""
OUTLIER = 3.0
"""A larger error counts as one of this size: a kernel that is compiled, a slow disk. No larger factor would leave time for training."""


class Risk:
    """The factor by which predictions are multiplied so that the share `attainment` of them is not exceeded.

    It is the empirical quantile of measured over predicted time in a window of the latest. The share 1 - `attainment` of the
    window may be larger, so a single outlier changes nothing. Before there are `1 / (1 - attainment)` errors the factor is the
    second largest of them without outliers, at least `FIRST_GUESS`.
    """

    def __init__(self, attainment: float) -> None:
        assert 0 < attainment < 1, attainment
        self._attainment = attainment
        self._enough = math.ceil(1 / (1 - attainment) - 1e-9)
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._limit = max(WINDOW, 2 * self._enough)
        self.factor = FIRST_GUESS

    def add(self, error: float) -> None:
        """`error`: measured over predicted seconds."""
        error = min(error, OUTLIER)
        self._recent.append(error)
        insort(self._sorted, error)
        if len(self._recent) > self._limit:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        count = len(self._sorted)
        if count >= self._enough:
            self.factor = self._sorted[math.ceil(count * self._attainment - 1e-9) - 1]
        else:
            usual = self._sorted[: bisect_left(self._sorted, OUTLIER)]
            self.factor = max([FIRST_GUESS, *usual[-2:-1]])
