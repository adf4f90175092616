"""The interface of update rules: what changes weights by their gradients. Each has a file in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class WeightRange:
    """A part of the flat buffers with a learning rate of its own. Letters: N elements of the part."""

    weights_N: Tensor  # noqa: N815
    """fp32, changed in place."""
    grads_N: Tensor  # noqa: N815
    """fp32."""
    moments: Sequence[Tensor]
    """One for each kind of `admission.optimizers` between weights and the best weights, changed in place: (N), or (N /
    `per`). Several ranges may have the same memory, if their moments are paged."""
    times: float
    """Its learning rate, in multiples of the schedule's."""


class UpdateRule(Protocol):
    """Updates the ranges it was made for."""

    def update(self, number: int, learning_rate: float) -> None:
        """One step of the range of this number. The gradients are as they were, or not: they are not read again."""

    def set_steps(self, steps: int) -> None:
        """So many steps of all ranges were done before."""
