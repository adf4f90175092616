"""The interface of one micro-batch's forward and backward through the decoder layers. T packed tokens, D hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

LayerTensors = Sequence[Sequence[Tensor]]
"""Tensors by layer (L layers)."""


class LayerPass(Protocol):
    """Runs the layers forward in order, then backward from the last to the lowest trained one."""

    def forward(self, i: int, h_1TD: Tensor) -> Tensor:
        """Return layer i's output (1, T, D), detached."""
        ...

    def backward(self, i: int, gradient_1TD: Tensor) -> Tensor:
        """Add layer i's LoRA gradients to their sums; return the gradient of its input. For the lowest trained layer
        the result is unspecified and never read."""
        ...
