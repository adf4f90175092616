"""The interface of LoRA terms of experts. S rows, each one token's for one of its experts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from coserve.kernels.lora.experts.rows import ExpertRows


class ExpertLora(Protocol):
    """The experts' LoRA terms of one step."""

    @property
    def learned(self) -> frozenset[int]:
        """Ids of the pairs' tensors, whose gradients autograd returns."""
        ...

    def changes(self, sites: Collection[str]) -> bool:
        """Whether an adapter of the step changes one of these parameters."""
        ...

    def sorted_rows(self, chosen_TK: Tensor, experts: int) -> ExpertRows:
        """Return the rows of a call in the order that `add` needs. `chosen_TK`: the experts of each token."""
        ...

    def add(self, site: str, y_SO: Tensor, x_SD: Tensor, rows: ExpertRows) -> Tensor:
        """Return `y` plus the parameter's terms for the inputs `x` of these rows."""
        ...
