"""Predicted seconds of steps and micro-steps, learned from measured ones. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

WINDOW = 5
"""Samples that an estimate is computed from."""


class Estimate:
    """Median of the last five samples, but at most the larger of the last two.

    One outlier (a kernel that is compiled, a slow disk) does not change the estimate; a lasting rise does within three
    samples. A fall counts after two: too high an estimate stops training, one too low makes one slice late. A single
    sample gives no estimate: the first one is often an outlier.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)

    @property
    def seconds(self) -> float | None:
        """The estimate; None before the second sample."""
        samples = self._samples
        if len(samples) < 2:
            return None
        median = sorted(samples)[(len(samples) - 1) // 2]
        return min(median, max(samples[-1], samples[-2]))


class Estimates:
    """One `Estimate` for each kind of work."""

    def __init__(self) -> None:
        self._by_kind: dict[Hashable, Estimate] = {}

    def add(self, kind: Hashable, seconds: float) -> None:
        self._by_kind.setdefault(kind, Estimate()).add(seconds)

    def predict(self, *kinds: Hashable) -> float:
        """Estimated seconds of the first of `kinds` that has an estimate; 0 if none has."""
        for kind in kinds:
            estimate = self._by_kind.get(kind)
            if estimate is not None and estimate.seconds is not None:
                return estimate.seconds
        return 0.0

    def keep(self, wanted: Callable[[Hashable], bool]) -> None:
        """Forget all kinds that are not `wanted`."""
        self._by_kind = {kind: estimate for kind, estimate in self._by_kind.items() if wanted(kind)}
