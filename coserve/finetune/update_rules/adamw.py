"""AdamW: torch's implementation, fused on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coserve.core.training.schemas import OptimStepRequest
from coserve.core.training.settings import TrainingSettings
from coserve.finetune.update_rules.interface import WeightRange


class AdamW:
    """Implements `UpdateRule`. Moments: `exp_avg`, `exp_avg_sq`."""

    def __init__(self, ranges: Sequence[WeightRange], training: TrainingSettings) -> None:
        device = ranges[0].weights_N.device
        fused = device.type == "cuda"
        self._times = [each.times for each in ranges]
        self._steps = torch.zeros(len(ranges), device=device if fused else "cpu")
        self._adamws = list[torch.optim.AdamW]()
        """One optimizer for each range."""
        for each, step in zip(ranges, self._steps, strict=True):
            adamw = torch.optim.AdamW(
                [each.weights_N],
                lr=training.learning_rate,
                betas=(training.beta1, training.beta2),
                eps=training.eps,
                weight_decay=training.weight_decay,
                fused=fused,
            )
            each.weights_N.grad = each.grads_N
            moments = dict(zip(("exp_avg", "exp_avg_sq"), each.moments, strict=True))
            adamw.state[each.weights_N] = {"step": step, **moments}
            self._adamws.append(adamw)

    def update(self, number: int, learning_rate: float) -> None:
        adamw = self._adamws[number]
        adamw.param_groups[0]["lr"] = self._times[number] * learning_rate
        adamw.step()

    def configure(self, adam: OptimStepRequest) -> None:
        """Use these parameters from the next step on."""
        for adamw in self._adamws:
            adamw.param_groups[0] |= {
                "betas": (adam.beta1, adam.beta2),
                "eps": adam.eps,
                "weight_decay": adam.weight_decay,
            }

    def set_steps(self, steps: int) -> None:
        self._steps.fill_(steps)
