"""The tensors of an adapter in one flat buffer, so that one kernel or one copy handles all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ALIGNED = 64
"""Elements: every tensor starts at a multiple of it, so that kernels read whole cache lines in any dtype of two bytes or more."""
BLOCK = 1 << 23
"""Elements of a block, unless a tensor is larger: 32 MiB in fp32."""


class FlatLayout:
    """Where each named tensor lies in a buffer of `size` elements. Elements between tensors are padding.

    No tensor crosses a multiple of `block`, so that the buffer may also lie in separate pieces of that size.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], block: int = BLOCK) -> None:
        sizes = {name: -(-shape.numel() // ALIGNED) * ALIGNED for name, shape in shapes.items()}
        self.block = max(block, *sizes.values())
        self._places: dict[str, tuple[int, torch.Size]] = {}
        self.size = 0
        for name, shape in shapes.items():
            if self.size % self.block + sizes[name] > self.block:
                self.size += -self.size % self.block
            self._places[name] = self.size, shape
            self.size += sizes[name]

    def start(self, name: str) -> int:
        """The first element of the tensor."""
        return self._places[name][0]

    def views(self, flat_N: Tensor) -> dict[str, Tensor]:
        """The tensors by name, contiguous, as views of `flat_N` (`size` elements)."""
        return self.block_views([flat_N[start : start + self.block] for start in range(0, self.size, self.block)])

    def block_views(self, blocks: Sequence[Tensor]) -> dict[str, Tensor]:
        """As `views`, of a buffer that lies in blocks of `block` elements; the last one may be shorter."""
        found = {}
        for name, (start, shape) in self._places.items():
            number, at = divmod(start, self.block)
            found[name] = blocks[number][at : at + shape.numel()].view(shape)
        return found
