"""Memory in which programs of one launch hand each other the shrinks of a step's only row."""

from __future__ import annotations

import torch
from torch import Tensor

UNWRITTEN = -1
"""Bits of an entry that is not there yet: a NaN that no product has."""
ENTRIES = 512
"""Size of a buffer: at least three sites times the largest LoRA rank that is served."""


class Shrinks:
    """Two buffers (int32, the bits of fp32), which alternate: a launch clears the one of the launch before. For one
    stream."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = torch.empty(2, ENTRIES, dtype=torch.int32, device=device)
        self._turn = 0

    def begin(self) -> None:
        """Begin a forward: its launches start with the first buffer, in graphs too."""
        self._buffers.fill_(UNWRITTEN)
        self._turn = 0

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the next launch's buffer and the last one's."""
        self._turn = 1 - self._turn
        return self._buffers[1 - self._turn], self._buffers[self._turn]
