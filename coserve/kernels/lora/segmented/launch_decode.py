"""Launches of the decode kernels: few rows per adapter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.kernels.gpu.device import device_info
from coserve.kernels.gpu.launcher import Launcher, options
from coserve.kernels.gpu.rounding import cdiv
from coserve.kernels.lora.segmented import decode_kernel
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK, SiteTable
from coserve.kernels.lora.segmented.block_sizes import (
    MAX_SITES,
    DecodeBlocks,
    decode_blocks,
    decode_splits,
    rank_block,
    rows_aligned,
    shrink_steps,
)
from coserve.kernels.lora.segmented.plan import TilePlan

DECODE_SHRINK, DECODE_EXPAND = Launcher(decode_kernel.shrink), Launcher(decode_kernel.expand)


def decode(
    ys: Sequence[Tensor],
    x_TD: Tensor,
    plan: TilePlan,
    table: SiteTable,
    *,
    blocks: DecodeBlocks | None = None,
    overlapped: bool = False,
) -> None:
    """`y += scaling (x Aᵀ) Bᵀ` in place for up to three sites that read x (T, D). `overlapped`: see `decode_kernel.shrink`."""
    tiles, items, ranks, rows, R = plan.tiles.tiles, plan.tiles.items, table.ranks, plan.tiles.rows, plan.R
    tokens, inputs = x_TD.shape
    shape = tuple(y.shape[1] for y in ys), tiles.shape[0], items.shape[0]
    blocks = blocks or decode_blocks(inputs, *shape, rows, R)
    sites, splits = len(ys), decode_splits(inputs, blocks)
    assert sites == ranks.shape[1] <= MAX_SITES, f"expected the table's sites, {MAX_SITES} at most, got {sites}"
    if not tiles.shape[0] or not tokens:
        return
    h = torch.empty(splits, sites, tokens, R, dtype=torch.float32, device=x_TD.device)
    three = [ys[min(site, sites - 1)] for site in range(MAX_SITES)]
    widths, strides = [y.shape[1] for y in three], [y.stride(0) for y in three]
    output_blocks = sum(cdiv(y.shape[1], blocks.o) for y in ys)
    block_r = rank_block(R, blocks.r)
    sums = {"SITES": sites, "SPLITS": splits, "ALIGNED": rows_aligned(ys)}
    where, row, pdl = (table.addresses, ranks), ranks.stride(0), blocks.pdl and device_info(x_TD.device).early_launch
    DECODE_SHRINK(
        (items.shape[0], splits, sites), (x_TD, h, items, *where), (inputs, x_TD.stride(0), row, tokens, R),
        BLOCK_T=rows, BLOCK_R=RANK_BLOCK, **shrink_steps(blocks, overlapped=overlapped), BLOCKED=table.blocked,
        **options(pdl, blocks.overlapped_warps if overlapped else blocks.shrink_warps, 1),
    )  # fmt: skip
    DECODE_EXPAND(
        (output_blocks, tiles.shape[0], 1), (*three, h, tiles, *where, table.scalings), (*widths, *strides, row, tokens, R), **sums,
        BLOCK_T=rows, BLOCK_R=block_r, BLOCK_O=blocks.o, SINGLE=block_r >= R, BLOCKED=table.blocked, **options(pdl, blocks.expand_warps, 1),
    )  # fmt: skip
