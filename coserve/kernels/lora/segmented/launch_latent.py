"""Launches of the terms of latent attention."""

from __future__ import annotations

from torch import Tensor

from coserve.kernels.gpu.launcher import Launcher
from coserve.kernels.gpu.rounding import next_power_of_2
from coserve.kernels.lora.latent import HeadSizes
from coserve.kernels.lora.segmented import latent_kernel
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK, SiteTable
from coserve.kernels.lora.segmented.tiles import Tiles

TERMS = Launcher(latent_kernel.terms)
BLOCK_L = 128
"""Numbers of a latent that a program multiplies at once."""


def add_terms(y: Tensor, x: Tensor, sizes: HeadSizes, tiles: Tiles, table: SiteTable, *, queries: bool) -> None:
    """Add the terms of queries, x (H, T, N) and y (H, T, L), or of outputs, x (H, T, L) and y (H, T, E), to the tiles'
    rows of y in place (`kernels.lora.latent`). `table`: of the site alone. Can be captured: the contents of `tiles` and
    `table` may change between replays."""
    if not tiles.tiles.shape[0]:
        return
    width = sizes.nope if queries else sizes.value
    TERMS(
        (y.shape[0], tiles.tiles.shape[0], 1),
        (x, y, tiles.tiles, table.addresses, table.ranks, table.scalings),
        (x.stride(0), x.stride(1), y.stride(0), y.stride(1), table.ranks.stride(0)),
        L=(y if queries else x).shape[2],
        N=sizes.nope,
        E=sizes.value,
        QUERIES=queries,
        BLOCK_T=max(16, tiles.rows),
        BLOCK_R=RANK_BLOCK,
        BLOCK_L=BLOCK_L,
        BLOCK_O=max(16, next_power_of_2(width)),
        BLOCKED=table.blocked,
        num_warps=4,
    )
