"""Predicted seconds of steps and micro-steps, learned from measured ones. Pure: no torch, no IO, no clock.

A prediction has three factors. The shape says how time depends on what is computed (`Regression`). The level says how
fast the device is now: the median of the latest measured times over their shapes. The risk says how wrong such
predictions have been (`Risk`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Sequence
from operator import mul
from typing import NamedTuple


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


MEMORY, MEMORY_SHARE = 500, 0.25
"""Decay of the samples: after this many newer ones, or this share of all so far if that is less, a sample has 1/e of
the weight of a new one. So the first ones, among which no outlier can be told, soon count little."""
RIDGE = 1e-4
"""Shrinks each coefficient by this fraction, so that none grows without bound where features are collinear."""
SWEEPS = 2
"""Coordinate-descent sweeps per sample. Each starts from the last solution, so it converges over the samples."""
LARGEST_WEIGHT = 1e9
"""Largest weight of a new sample relative to the first. Beyond it all sums are rescaled."""
WINDOW = 5
"""Latest samples whose median is a predictor's level."""
CLIP = 2.0
"""A sample is clipped to within this factor of its prediction before the regression learns from it, against
outliers."""
ATTAINMENT = 0.995
"""Default fraction of answers that must be in time (`slo_attainment`)."""


class Regression:
    """Coefficients `w >= 0` that minimise the sum of `((y - w x) / y) ** 2`, with older samples fading exponentially.

    Relative errors, so that steps of 5 ms count as much as steps of 100 ms. The normal equations are kept (Ljung,
    "System Identification", 2nd ed., section 11.2) and solved by cyclic coordinate descent, which keeps a coefficient
    at 0 where the best one would be negative. A direction in which samples do not differ keeps its coefficients.
    """

    def __init__(self, features: int) -> None:
        self._products = [[0.0] * features for _ in range(features)]
        self._targets = [0.0] * features
        self._weight, self._count = 1.0, 0
        self.coefficients = [0.0] * features

    def value(self, x: Sequence[float]) -> float:
        return float(sum(map(mul, self.coefficients, x)))

    def add(self, x: Sequence[float], y: float) -> None:
        """Fit a sample: features `x` >= 0, not all 0, and seconds `y` > 0."""
        z = [value / y for value in x]
        self._count += 1
        weight = self._weight = self._weight * (1 + 1 / min(MEMORY, 1 + MEMORY_SHARE * self._count))
        if weight > LARGEST_WEIGHT:
            self._scale(1 / weight)
            weight = 1.0
        for j, z_j in enumerate(z):
            if z_j:
                row, scaled = self._products[j], weight * z_j
                self._targets[j] += scaled
                for i, z_i in enumerate(z):
                    row[i] += scaled * z_i
        coefficients = self.coefficients
        for _ in range(SWEEPS):
            for j, row in enumerate(self._products):
                own = row[j]
                if own > 0:
                    rest = sum(map(mul, row, coefficients)) - own * coefficients[j]
                    coefficients[j] = max(0.0, (self._targets[j] - rest) / (own * (1 + RIDGE)))

    def _scale(self, factor: float) -> None:
        self._weight = 1.0
        self._targets = [factor * value for value in self._targets]
        self._products = [[factor * value for value in row] for row in self._products]


class Prediction(NamedTuple):
    """Predicted seconds: the expected value; `most`, exceeded as rarely as the attainment allows (`queues/costs.py`);
    and the mean, slow outliers included."""

    expected: float
    most: float
    mean: float


UNKNOWN = Prediction(0.0, 0.0, 0.0)


class Predictor:
    """Predicts one kind of work from its features, such as `(1, tokens)`.

    The level is the median of the last five samples, but at most the larger of the last two. One outlier (a kernel that
    is compiled, a slow disk) does not change it; a lasting rise does within three samples. A fall counts after two: too
    high a prediction stops training, one too low makes one slice late. A single sample predicts nothing: the first one
    is often an outlier.
    """

    def __init__(self, features: int, attainment: float = ATTAINMENT) -> None:
        self._shape, self._risk, self._attainment = Regression(features), Risk(attainment), attainment
        self._samples: deque[tuple[Sequence[float], float]] = deque(maxlen=WINDOW)
        self._level: float | None = None

    def add(self, features: Sequence[float], seconds: float) -> None:
        """All samples have the same number of features, each at least 0, the first above 0."""
        predicted = self.predict(features)
        if predicted is None or predicted.expected <= 0:
            learned = seconds
        else:
            expected = predicted.expected
            self._risk.add(seconds / expected)
            learned = min(max(seconds, expected / CLIP), expected * CLIP)
        if learned > 0:
            self._shape.add(features, learned)
        self._samples.append((features, seconds))
        if len(self._samples) == 3:
            self._begin_anew()
        if len(self._samples) >= 2:
            ratios = [seconds / self._shape_of(features) for features, seconds in self._samples]
            self._level = min(sorted(ratios)[(len(ratios) - 1) // 2], max(ratios[-2:]))

    def predict(self, features: Sequence[float]) -> Prediction | None:
        """None before the second sample."""
        if self._level is None:
            return None
        expected = self._level * self._shape_of(features)
        return Prediction(expected, expected * self._risk.factor, expected * self._risk.mean)

    @property
    def known(self) -> bool:
        return self._level is not None

    def forget_errors(self) -> None:
        self._risk = Risk(self._attainment)

    def _begin_anew(self) -> None:
        """Learn the first three samples again, none as less than their median allows: one far too short outweighs all
        others, as errors are relative."""
        self._shape, middle = Regression(len(self._samples[0][0])), sorted(seconds for _, seconds in self._samples)[1]
        for features, seconds in self._samples:
            if (learned := max(seconds, middle / CLIP)) > 0:
                self._shape.add(features, learned)

    def _shape_of(self, features: Sequence[float]) -> float:
        return self._shape.value(features) or 1.0


class Predictors:
    """One `Predictor` for each kind of work, all with the same features. Beyond `most` kinds, the least recently
    measured is dropped."""

    def __init__(self, features: int, attainment: float = ATTAINMENT, *, most: float = math.inf) -> None:
        self._features, self._attainment, self._most = features, attainment, most
        self._by_kind: dict[Hashable, Predictor] = {}
        """Ordered by last measurement, latest last."""

    def add(self, kind: Hashable, features: Sequence[float], seconds: float) -> None:
        predictor = self._by_kind.pop(kind, None) or Predictor(self._features, self._attainment)
        self._by_kind[kind] = predictor
        predictor.add(features, seconds)
        if len(self._by_kind) > self._most:
            self.forget(next(iter(self._by_kind)))

    def predict(self, features: Sequence[float], *kinds: Hashable) -> Prediction:
        """Predict with the first of `kinds` that is known; `UNKNOWN` if none is."""
        for kind in kinds:
            predictor = self._by_kind.get(kind)
            if predictor is not None and (found := predictor.predict(features)) is not None:
                return found
        return UNKNOWN

    def knows(self, kind: Hashable) -> bool:
        """Whether this kind was measured often enough to predict it without falling back to another."""
        predictor = self._by_kind.get(kind)
        return predictor is not None and predictor.known

    def forget_errors(self, kind: Hashable) -> None:
        """Reset the risk of this kind; its expected times stay."""
        if (predictor := self._by_kind.get(kind)) is not None:
            predictor.forget_errors()

    def forget(self, kind: Hashable) -> None:
        self._by_kind.pop(kind, None)


ERRORS = 1024
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
        self._errors = SlidingQuantile(max(ERRORS, 2 * self._enough))
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
