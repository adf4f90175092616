"""Launches of the decode kernels: few rows per adapter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.kernels.gpu.device import device_info
from coserve.kernels.gpu.launcher import Launcher, options
from coserve.kernels.gpu.rounding import cdiv
from coserve.kernels.lora.exchange import Exchange
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
from coserve.kernels.lora.segmented.tiles import Tiles

DECODE_SHRINK, DECODE_EXPAND = Launcher(decode_kernel.shrink), Launcher(decode_kernel.expand)


def decode(
    ys: Sequence[Tensor],
    x_TD: Tensor,
    plan: TilePlan,
    table: SiteTable,
    *,
    blocks: DecodeBlocks | None = None,
    overlapped: bool = False,
    exchange: Exchange | None = None,
) -> None:
    """Compute `y += scaling (x Aᵀ) Bᵀ` in place for up to three sites that read x (T, D).

    `overlapped`: see `decode_kernel.shrink`. `exchange`: for fully sharded pairs, whose `ys` are already narrowed to
    `Exchange.outputs`.
    """
    tiles, items, rows, R = plan.tiles.tiles, plan.tiles.items, plan.tiles.rows, plan.R
    tokens, inputs = x_TD.shape
    blocks = blocks or decode_blocks(inputs, tuple(y.shape[1] for y in ys), tiles.shape[0], items.shape[0], rows, R)
    assert len(ys) == table.sites <= MAX_SITES, f"expected the table's sites, {MAX_SITES} at most, got {len(ys)}"
    if not tiles.shape[0] or not tokens:
        return
    h = decode_shrink(x_TD, plan.tiles, table, R, blocks, overlapped=overlapped, exchange=exchange)
    shards, splits, sites, _, width = h.shape
    three = [ys[min(site, sites - 1)] for site in range(MAX_SITES)]
    widths, strides = [y.shape[1] for y in three], [y.stride(0) for y in three]
    output_blocks = sum(cdiv(y.shape[1], blocks.o) for y in ys)
    block_r, row = rank_block(R, blocks.r), table.ranks.stride(0)
    sums = {"SITES": sites, "SPLITS": splits, "ALIGNED": rows_aligned(ys)}
    pdl = blocks.pdl and device_info(x_TD.device).early_launch
    DECODE_EXPAND(
        (output_blocks, tiles.shape[0], 1),
        (*three, h, tiles, table.addresses, table.ranks, table.scalings),
        (*widths, *strides, row, tokens, width),
        **sums,
        BLOCK_T=rows,
        BLOCK_R=block_r,
        BLOCK_O=blocks.o,
        SINGLE=block_r >= R,
        BLOCKED=table.blocked,
        SHARDS=shards,
        **options(pdl, blocks.expand_warps, 1),
    )


def decode_shrink(
    x_TD: Tensor,
    tiles: Tiles,
    table: SiteTable,
    R: int,
    blocks: DecodeBlocks,
    *,
    overlapped: bool = False,
    exchange: Exchange | None = None,
) -> Tensor:
    """Return x Aᵀ (1, splits, G, T, R) fp32, or exchanged (`Exchange.run`). Only a slot's own ranks are written."""
    tokens, inputs = x_TD.shape
    sites, splits, row = table.sites, decode_splits(inputs, blocks), table.ranks.stride(0)
    shards, own = (1, 0) if exchange is None else (exchange.shards, exchange.own)
    width = cdiv(R, shards)
    fill = exchange is not None and exchange.needs_all_parts(shards * sites * tokens * width * torch.float32.itemsize)
    h = torch.empty(shards if fill else 1, splits, sites, tokens, width, dtype=torch.float32, device=x_TD.device)
    pdl = blocks.pdl and device_info(x_TD.device).early_launch
    DECODE_SHRINK(
        (tiles.items.shape[0], splits, sites),
        (x_TD, h, tiles.items, table.addresses, table.ranks),
        (inputs, x_TD.stride(0), row, tokens, width, own),
        BLOCK_T=tiles.rows,
        BLOCK_R=RANK_BLOCK,
        **shrink_steps(blocks, overlapped=overlapped),
        BLOCKED=table.blocked,
        SHARDS=shards,
        FILL=fill,
        **options(pdl, blocks.overlapped_warps if overlapped else blocks.shrink_warps, 1),
    )
    return h if exchange is None else exchange.run(h)
