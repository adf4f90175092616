"""AdamW: torch's own, fused on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coserve.finetune.update_rules.interface import WeightRange
from coserve.types import TrainingSettings


class AdamW:
    """See `UpdateRule`. Moments: `exp_avg`, `exp_avg_sq`."""

    def __init__(self, ranges: Sequence[WeightRange], training: TrainingSettings) -> None:
        device = ranges[0].weights_N.device
        fused = device.type == "cuda"
        self._times = [each.times for each in ranges]
        self._adamw = torch.optim.AdamW(
            [{"params": [each.weights_N]} for each in ranges],
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            eps=training.eps,
            weight_decay=training.weight_decay,
            fused=fused,
        )
        self._steps = torch.zeros(len(ranges), device=device if fused else "cpu")
        for each, step in zip(ranges, self._steps, strict=True):
            each.weights_N.grad = each.grads_N
            moments = dict(zip(("exp_avg", "exp_avg_sq"), each.moments, strict=True))
            self._adamw.state[each.weights_N] = {"step": step, **moments}

    def update(self, learning_rate: float) -> None:
        for group, times in zip(self._adamw.param_groups, self._times, strict=True):
            group["lr"] = times * learning_rate
        self._adamw.step()

    def set_steps(self, steps: int) -> None:
        self._steps.fill_(steps)
