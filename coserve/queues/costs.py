"""Predicted seconds of steps and micro-steps, learned from measured ones. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

WINDOW = 5
"""Samples that a prediction rests on."""


class Estimate:
    """Median of the last five samples; two low samples lower it at once.

    A sample may be an outlier (a kernel is compiled, a disk is slow), several are a change: one outlier of any size never
    shows in the median, a rise that lasts does within three samples. A fall is believed after two: to predict too much stops training, to
    predict too little makes one slice late. A single sample predicts nothing: the first one is often an outlier.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)

    @property
    def seconds(self) -> float | None:
        """The prediction; None before the second sample."""
        samples = self._samples
        if len(samples) < 2:
            return None
        median = sorted(samples)[(len(samples) - 1) // 2]
        return min(median, max(samples[-1], samples[-2]))


class Estimates:
    """One `Estimate` a kind of work."""

    def __init__(self) -> None:
        self._by_kind: dict[Hashable, Estimate] = {}

    def add(self, kind: Hashable, seconds: float) -> None:
        self._by_kind.setdefault(kind, Estimate()).add(seconds)

    def predict(self, *kinds: Hashable) -> float:
        """Of the first of `kinds` that was measured often enough; 0 if none was."""
        for kind in kinds:
            estimate = self._by_kind.get(kind)
            if estimate is not None and estimate.seconds is not None:
                return estimate.seconds
        return 0.0

    def keep(self, wanted: Callable[[Hashable], bool]) -> None:
        """Forget all other kinds."""
        self._by_kind = {kind: estimate for kind, estimate in self._by_kind.items() if wanted(kind)}
