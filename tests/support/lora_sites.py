"""Sites of one input with random LoRA pairs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from coserve.kernels.lora.types import LoraPair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D = 72

Sites = list[tuple[LoraPair | None, ...]]


def drawn(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make_sites(
    sizes: tuple[int, ...],
    ranks: list[tuple[int, ...]],
    blocks: Mapping[tuple[int, int], tuple[int, int]] = MappingProxyType({}),
) -> Sites:
    """Learning adapters; rank 0: the adapter leaves the site out. `blocks`: (site, adapter) -> its blocks of A and of
    B."""

    def pair(site: int, adapter: int, rank: int) -> LoraPair | None:
        if not rank:
            return None
        a_blocks, b_blocks = blocks.get((site, adapter), (1, 1))
        a = drawn(rank, D // a_blocks, seed=10 * site + adapter) * 0.1
        b = drawn(sizes[site], rank // b_blocks, seed=100 + 10 * site + adapter) * 0.1
        return LoraPair(a.requires_grad_(), b.requires_grad_(), 0.5 + adapter, a_blocks=a_blocks, b_blocks=b_blocks)

    return [tuple(pair(site, adapter, rank) for adapter, rank in enumerate(own)) for site, own in enumerate(ranks)]


def leaves(sites: Sites) -> list[torch.Tensor]:
    return [tensor for own in sites for pair in own if pair is not None for tensor in (pair.a_RD, pair.b_OR)]
