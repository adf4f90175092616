"""Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2): steps of a fixed size, along the sign of a
moving average.

c = beta1 * m + (1 - beta1) * g
w = w - rate * (sign(c) + weight_decay * w)
m = beta2 * m + (1 - beta2) * g
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coserve.core.training.settings import TrainingSettings
from coserve.finetune.update_rules.interface import WeightRange

AT_ONCE = 1 << 22
"""Elements per call: bounds an update's only temporary to 16 MiB, freed before the next micro-batch."""


class Lion:
    """Implements `UpdateRule`. Moments: `exp_avg`."""

    def __init__(self, ranges: Sequence[WeightRange], training: TrainingSettings, *, at_once: int = AT_ONCE) -> None:
        """`at_once`: elements per call."""
        self._beta1, self._beta2 = training.beta1, training.beta2
        self._weight_decay = training.weight_decay
        self._times = [each.times for each in ranges]
        self._parts = [
            [
                *zip(
                    *(torch.split(tensor, at_once) for tensor in (each.weights_N, each.grads_N, *each.moments)),
                    strict=True,
                )
            ]
            for each in ranges
        ]
        """Chunks of each range: weights, gradients, moments."""

    @torch.no_grad()
    def update(self, number: int, learning_rate: float) -> None:
        rate = self._times[number] * learning_rate
        for weights_N, grads_N, exp_avg_N in self._parts[number]:
            weights_N.mul_(1 - rate * self._weight_decay)
            weights_N.add_(torch.lerp(exp_avg_N, grads_N, 1 - self._beta1).sign_(), alpha=-rate)
            exp_avg_N.lerp_(grads_N, 1 - self._beta2)

    def set_steps(self, steps: int) -> None:
        """Does nothing: no step depends on the number of earlier ones."""
