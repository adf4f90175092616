"""Adapters of a known size, for stores in tests."""

from __future__ import annotations

import torch

from coserve.core.types import LoraSettings
from coserve.kernels.lora.types import LoraPair
from coserve.model.lora import LoraWeights

RANK_BYTES = 256
"""Of an adapter of rank 1."""


def sized(rank: int = 1) -> LoraWeights:
    """Of `RANK_BYTES` a rank."""
    return LoraWeights(LoraSettings(r=rank), {"q": LoraPair(torch.zeros(rank, 32), torch.zeros(32, rank), 1.0)})


def room_for(adapters: int) -> int:
    """Room for so many of rank 1."""
    return adapters * RANK_BYTES
