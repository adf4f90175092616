"""Adapters of a known size, for stores in tests, and whether two are the same."""

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


def same_adapter(one: LoraWeights, other: LoraWeights) -> bool:
    """Bit for bit, in the same order of sites; whatever the settings are."""
    return list(one.sites) == list(other.sites) and all(
        torch.equal(pair.a_RD, other.sites[site].a_RD)
        and torch.equal(pair.b_OR, other.sites[site].b_OR)
        and (pair.scaling, pair.a_blocks, pair.b_blocks)
        == (other.sites[site].scaling, other.sites[site].a_blocks, other.sites[site].b_blocks)
        for site, pair in one.sites.items()
    )
