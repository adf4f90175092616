"""How far predictions are wrong, as a quantile of what was measured. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math

from coserve.queues.sliding import SlidingQuantile

WINDOW = 1024
"""Latest errors that the quantile is taken from; more for an attainment above 99.98%."""
FIRST_GUESS = 1.25
"""Least factor while there are too few errors for the quantile."""
TAKEN_BACK = 8
"""Times as often as `attainment` says may a single prediction be exceeded: a token that is late is taken back by the
next ones, and what is asked for is the mean over an answer. In virtual time 10 lost answers of a few tokens with errors
of 2 to 4 times in one step of 100."""
LEAST_QUANTILE = 0.8
OUTLIER = 3.0
"""A larger error counts as one of this size: a kernel that is compiled, a slow disk. No larger factor would leave time
for training."""


class Risk:
    """The factor by which predictions are multiplied so that the share `attainment` of the answers is in time.

    It is the empirical quantile of measured over predicted time in a window of the latest: the share `TAKEN_BACK` * (1
    - `attainment`) of the window may be larger, so a single outlier changes nothing. Before there are so many errors
      that one may be larger, the factor is the
    second largest of them without outliers, at least `FIRST_GUESS`.
    """

    def __init__(self, attainment: float) -> None:
        assert 0 < attainment < 1, attainment
        self._quantile = max(LEAST_QUANTILE, 1 - TAKEN_BACK * (1 - attainment))
        self._enough = math.ceil(1 / (1 - self._quantile) - 1e-9)
        self._errors = SlidingQuantile(max(WINDOW, 2 * self._enough))
        self.factor = FIRST_GUESS

    @property
    def mean(self) -> float:
        """Of the errors in the window, at least 1."""
        return max(1.0, self._errors.mean) if len(self._errors) else 1.0

    def add(self, error: float) -> None:
        """`error`: measured over predicted seconds."""
        self._errors.add(min(error, OUTLIER))
        if len(self._errors) >= self._enough:
            self.factor = self._errors.at(self._quantile)
        else:
            self.factor = max(FIRST_GUESS, self._errors.largest_below(OUTLIER, rank=2) or 0.0)
