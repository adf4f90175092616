"""One micro-batch's forward and backward through the decoder layers: what `MicroBatchRunner` asks of it. T packed
tokens, D hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

LayerTensors = Sequence[Sequence[Tensor]]
"""Tensors by layer (L)."""


class LayerPass(Protocol):
    """Layers run in their order, then those from the last one down to the first that is trained run backward."""

    def forward(self, i: int, h_1TD: Tensor) -> Tensor:
        """Layer i's output (1, T, D), detached."""
        ...

    def backward(self, i: int, gradient_1TD: Tensor) -> Tensor:
        """Add layer i's LoRA gradients to their sums; return the gradient of its input. Of the lowest trained layer
        that is never read, and may be anything."""
        ...
