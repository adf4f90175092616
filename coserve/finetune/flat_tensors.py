"""The tensors of an adapter in one flat buffer, so that one kernel or one copy handles all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from coserve.admission.optimizers import ALIGNED
from coserve.admission.shapes import BLOCK


class FlatLayout:
    """Layout of named tensors in a buffer of `size` elements. Elements between tensors are padding.

    No tensor crosses a multiple of `block`, so that the buffer may also be split into blocks of that size.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], block: int = BLOCK, aligned: int = ALIGNED) -> None:
        """Every tensor starts at a multiple of `aligned` elements, which divides `block`."""
        sizes = {name: -(-shape.numel() // aligned) * aligned for name, shape in shapes.items()}
        self.block = max(block, *sizes.values())
        self._places: dict[str, tuple[int, torch.Size]] = {}
        self.size = 0
        for name, shape in shapes.items():
            if self.size % self.block + sizes[name] > self.block:
                self.size += -self.size % self.block
            self._places[name] = self.size, shape
            self.size += sizes[name]

    def start(self, name: str) -> int:
        """Index of the tensor's first element."""
        return self._places[name][0]

    def views(self, flat_N: Tensor, per: int = 1) -> dict[str, Tensor]:
        """Return the tensors by name, as contiguous views of `flat_N` (`size` elements). `per`: see `block_views`."""
        return self.block_views(list(torch.split(flat_N, self.block // per)), per)

    def block_views(self, blocks: Sequence[Tensor], per: int = 1) -> dict[str, Tensor]:
        """Like `views`, for a buffer split into blocks of `block` elements; the last one may be shorter.

        `per`: the buffer holds one element for this many of the layout's; `aligned` is a multiple of it. The views are
        1-D then."""
        found = {}
        for name, (start, shape) in self._places.items():
            number, at = divmod(start, self.block)
            first, last = at // per, -(-(at + shape.numel()) // per)
            found[name] = blocks[number][first:last].view(shape if per == 1 else (-1,))
        return found
