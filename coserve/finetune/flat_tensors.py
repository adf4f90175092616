"""The tensors of an adapter in one flat buffer, so that one kernel or one copy handles all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNED = 64
"""Elements: every tensor starts at a multiple of it, so that kernels read whole cache lines in any dtype of two bytes or more."""


class FlatLayout:
    """Where each named tensor lies in a buffer of `size` elements. Elements between tensors are padding."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._places: dict[str, tuple[int, torch.Size]] = {}
        self.size = 0
        for name, shape in shapes.items():
            self._places[name] = self.size, shape
            self.size += -(-shape.numel() // ALIGNED) * ALIGNED

    def views(self, flat_N: Tensor) -> dict[str, Tensor]:
        """The tensors by name, contiguous, as views of `flat_N` (`size` elements)."""
        return {
            name: flat_N[start : start + shape.numel()].view(shape) for name, (start, shape) in self._places.items()
        }
