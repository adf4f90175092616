"""How wrong predictions are, as a quantile of measured errors. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math

from coserve.queues.sliding import SlidingQuantile

WINDOW = 1024
"""Latest errors that the quantile is taken over; more for an attainment above 99.98%."""
FIRST_GUESS = 1.25
"""Least factor while there are too few errors for the quantile."""
TAKEN_BACK = 8
"""How many times more often than `1 - attainment` a single prediction may be exceeded: later tokens make up for a late
one, and the target is the mean over an answer. In simulation, 10 made answers of a few tokens late, with errors of 2 to
4 times in one step of 100."""
LEAST_QUANTILE = 0.8
"""Lowest quantile of the errors that a prediction is multiplied by, however low the target attainment is."""
OUTLIER = 3.0
"""Larger errors count as this one. They come from a kernel compilation or a slow disk, and a factor that covers them
would leave training no time."""


class Risk:
    """The factor on predictions with which the fraction `attainment` of answers is in time.

    It is an empirical quantile of measured over predicted time, over a sliding window: `TAKEN_BACK` * (1 -
    `attainment`) of the errors may be larger, so a single outlier changes nothing. Until there are enough errors for
    that quantile, the factor is the second largest error below `OUTLIER`, and at least `FIRST_GUESS`.
    """

    def __init__(self, attainment: float) -> None:
        assert 0 < attainment < 1, attainment
        self._quantile = max(LEAST_QUANTILE, 1 - TAKEN_BACK * (1 - attainment))
        self._enough = math.ceil(1 / (1 - self._quantile) - 1e-9)
        self._errors = SlidingQuantile(max(WINDOW, 2 * self._enough))
        self.factor = FIRST_GUESS

    @property
    def mean(self) -> float:
        """Mean of the errors in the window, at least 1."""
        return max(1.0, self._errors.mean) if len(self._errors) else 1.0

    def add(self, error: float) -> None:
        """`error`: measured over predicted seconds."""
        self._errors.add(min(error, OUTLIER))
        if len(self._errors) >= self._enough:
            self.factor = self._errors.at(self._quantile)
        else:
            self.factor = max(FIRST_GUESS, self._errors.largest_below(OUTLIER, rank=2) or 0.0)
