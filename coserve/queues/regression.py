"""Least squares with coefficients of at least 0, one sample at a time. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

MEMORY = 500
"""Samples after which one counts 1/e of a new one."""
RIDGE = 1e-4
"""Shrinks each coefficient by this fraction, so that none grows without bound where features are collinear."""
SWEEPS = 2
"""Coordinate-descent sweeps per sample. Each starts from the last solution, so it converges over the samples."""
LARGEST_WEIGHT = 1e9
"""Largest weight of a new sample relative to the first. Beyond it all sums are rescaled."""


class Regression:
    """Coefficients `w >= 0` that minimise the sum of `((y - w x) / y) ** 2`, with older samples fading exponentially.

    Relative errors, so that steps of 5 ms count as much as steps of 100 ms. The normal equations are kept (Ljung,
    "System Identification", 2nd ed., section 11.2) and solved by cyclic coordinate descent, which keeps a coefficient
    at 0 where the best one would be negative. A direction in which samples do not differ keeps its coefficients.
    """

    def __init__(self, features: int) -> None:
        self._products = [[0.0] * features for _ in range(features)]
        self._targets = [0.0] * features
        self._weight, self._growth = 1.0, 1 + 1 / MEMORY
        self.coefficients = [0.0] * features

    def value(self, x: Sequence[float]) -> float:
        return float(sum(map(mul, self.coefficients, x)))

    def add(self, x: Sequence[float], y: float) -> None:
        """`y` is above 0, and some `x` too."""
        z = [value / y for value in x]
        weight = self._weight = self._weight * self._growth
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
