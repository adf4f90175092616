"""The interface of update rules, which change weights by their gradients. Each rule has a file in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class WeightRange:
    """A range of the flat buffers with its own learning rate. Letters: N elements of the range."""

    weights_N: Tensor  # noqa: N815
    """fp32, changed in place."""
    grads_N: Tensor  # noqa: N815
    """fp32."""
    moments: Sequence[Tensor]
    """One tensor for each kind of moment (`admission.optimizers`), changed in place: (N), or (N / `per`). Ranges share
    memory if their moments are paged."""
    times: float
    """Learning-rate factor, relative to the schedule."""


class UpdateRule(Protocol):
    """Updates the ranges that it was made for."""

    def update(self, number: int, learning_rate: float) -> None:
        """Take one step of range `number`. The gradients may be overwritten: they are not read again."""

    def set_steps(self, steps: int) -> None:
        """Set the number of steps done for all ranges, after a restore."""
