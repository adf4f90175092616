"""Launches of the prefill kernels: many rows per adapter, in inference and in training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.kernels.gpu.device import device_info
from coserve.kernels.gpu.launcher import Launcher, options
from coserve.kernels.gpu.rounding import cdiv
from coserve.kernels.lora.segmented import prefill_kernel
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK, SiteTable
from coserve.kernels.lora.segmented.block_sizes import (
    LOOPED_MAX_RANK,
    MAX_SITES,
    PrefillBlocks,
    narrow,
    rank_block,
    rows_aligned,
    run_length,
    splits_of,
)
from coserve.kernels.lora.segmented.plan import TilePlan
from coserve.kernels.lora.segmented.tiles import Tiles

PREFILL_SHRINK, PREFILL_EXPAND = Launcher(prefill_kernel.shrink), Launcher(prefill_kernel.expand)


def prefill(
    ys: Sequence[Tensor],
    outs: Sequence[Tensor],
    x_TD: Tensor,
    plan: TilePlan,
    table: SiteTable,
    *,
    keep: bool,
) -> Tensor:
    """Compute `out = y + scaling (x Aᵀ) Bᵀ` for up to three sites that read x; `outs` may be `ys`.

    With `keep` returns h (G, T, R) in x's dtype. Only a slot's own ranks of it are written.
    """
    R, blocks = plan.R, plan.prefill
    block_o, run, _ = _run(ys, plan, blocks)
    splits, _, _, _ = _shrink_cut(x_TD, plan.tiles, R, blocks)
    if splits == 1 or run == 1 or splits * R > run * block_o:  # nothing to sum, or more to sum than the expand gains
        h = prefill_shrink(x_TD, plan, table)
        prefill_expand(ys, outs, h, plan, table)
        return h
    parts = prefill_shrink(x_TD, plan, table, finish=False)
    kept = torch.empty(parts.shape[1:], dtype=x_TD.dtype, device=x_TD.device) if keep else None
    prefill_expand(ys, outs, parts, plan, table, kept=kept)
    return parts if kept is None else kept


def _shrink_cut(x_TD: Tensor, own: Tiles, R: int, blocks: PrefillBlocks) -> tuple[int, int, int, int]:
    """Return (splits of k, blocks of k per split, their size, ranks per program) of a prefill shrink."""
    tiles = own.tiles
    wanted = blocks.shrink_programs * device_info(x_TD.device).multiprocessors
    # With few programs anyway, let more of them read x, since one program's loop over k at a large rank would set the
    # time.
    few = tiles.shape[0] * cdiv(R, 64) <= wanted
    block_r = rank_block(R, 64 if few else blocks.shrink_r)
    k = narrow(blocks.k, block_r, x_TD)
    programs = tiles.shape[0] * cdiv(R, block_r)
    return *splits_of(programs, x_TD.shape[1], k, wanted, blocks.split_length), k, block_r


def prefill_shrink(
    x_TD: Tensor,
    plan: TilePlan,
    table: SiteTable,
    *,
    finish: bool = True,
    shards: int = 1,
) -> Tensor:
    """Return h (G, T, R) in x's dtype, or without `finish` its partial sums (splits, G, T, R) fp32. Only a slot's own
    ranks are written.

    `shards`: A is sharded into so many equal shards, and `table` points at one of them; h has the ranks of a shard,
    rounded up to whole blocks.
    """
    blocks = plan.prefill
    tiles, rows, ranks = plan.tiles.tiles, plan.tiles.rows, table.ranks
    R = plan.R if shards == 1 else cdiv(plan.R, shards * RANK_BLOCK) * RANK_BLOCK
    tokens, inputs = x_TD.shape
    sites, pdl = ranks.shape[1], blocks.pdl and device_info(x_TD.device).early_launch
    splits, steps, k, block_r = _shrink_cut(x_TD, plan.tiles, R, blocks)
    assert finish or splits > 1, "expected parts"
    h = parts = torch.empty(sites, tokens, R, dtype=x_TD.dtype, device=x_TD.device)
    if splits > 1:
        parts = torch.empty(splits, sites, tokens, R, dtype=torch.float32, device=x_TD.device)
    h = h if finish else parts
    if not tiles.shape[0] or not tokens:
        return h
    stage = (rows + sites * block_r) * k * x_TD.element_size()
    stages = blocks.shrink_stages * 4 // 3 if block_r == 64 else blocks.shrink_stages
    warps = 4 if block_r <= 32 else 8
    PREFILL_SHRINK(
        (tiles.shape[0], splits, cdiv(R, block_r)),
        (x_TD, h, parts, plan.tiles.counters, tiles, table.addresses, ranks),
        (inputs, x_TD.stride(0), ranks.stride(0), tokens, R, steps),
        SITES=sites,
        SPLIT=finish and splits > 1,
        BLOCK_T=rows,
        BLOCK_R=block_r,
        BLOCK_K=k,
        BLOCKED=table.blocked,
        SHARDS=shards,
        **options(pdl, warps, min(stages, device_info(x_TD.device).shared_bytes // stage)),
    )
    return h


def _run(ys: Sequence[Tensor], plan: TilePlan, blocks: PrefillBlocks) -> tuple[int, int, int]:
    """Return (size of an output block, blocks per program, warps) of a prefill expand."""
    tiles, R = plan.tiles.tiles, plan.R
    size, warps = blocks.o // (2 if ys[0].element_size() == 4 else 1), blocks.expand_warps
    count = sum(cdiv(y.shape[1], size) for y in ys)
    if R <= 64 and tiles.shape[0] * count >= blocks.wide_blocks:
        size, warps = 2 * size, 2 * warps
        count = sum(cdiv(y.shape[1], size) for y in ys)
    return size, run_length(tiles.shape[0], count, R, blocks), warps


def prefill_expand(
    ys: Sequence[Tensor],
    outs: Sequence[Tensor],
    h: Tensor,
    plan: TilePlan,
    table: SiteTable,
    *,
    kept: Tensor | None = None,
    shards: int = 1,
) -> None:
    """Compute `out = y + scaling h Bᵀ` for up to three sites in one launch; `outs` may be `ys`.

    h: (G, T, R), or its partial sums (splits, G, T, R), whose sum is written to `kept`; they require several output
    blocks per program (`prefill`). With `shards`: (shards, G, T, ranks of a shard), for fully sharded pairs.
    """
    blocks = plan.prefill
    tiles, rows, ranks = plan.tiles.tiles, plan.tiles.rows, table.ranks
    (sites, tokens, width), R = h.shape[-3:], plan.R
    assert sites == len(ys) <= MAX_SITES, f"expected the table's sites, {MAX_SITES} at most, got {len(ys)}"
    if not tiles.shape[0] or not tokens:
        return
    three, results = ([each[min(site, sites - 1)] for site in range(MAX_SITES)] for each in (ys, outs))
    block_o, run, warps = _run(ys, plan, blocks)
    if run == 1:
        assert h.dim() == 3 or shards > 1, "expected whole h where a program has one output block"
        block_r, stages = rank_block(R, blocks.single_r), blocks.single_stages
    else:
        block_r, stages = rank_block(R, LOOPED_MAX_RANK), blocks.run_stages + (R > 64)
    PREFILL_EXPAND(
        (sum(cdiv(y.shape[1], block_o * run) for y in ys), tiles.shape[0], 1),
        (*three, *results, h, h if kept is None else kept, tiles, table.addresses, ranks, table.scalings),
        (*(y.shape[1] for y in three), *(y.stride(0) for y in (*three, *results)), ranks.stride(0), tokens, width),
        SITES=sites,
        ALIGNED=rows_aligned([*ys, *outs]),
        PARTS=h.shape[0] if h.dim() == 4 and shards == 1 else 1,
        KEEP=kept is not None,
        BLOCK_T=rows,
        BLOCK_R=block_r,
        BLOCK_O=block_o,
        BLOCKS=run,
        STAGES=stages,
        BLOCKED=table.blocked,
        SHARDS=shards,
        **options(blocks.pdl and device_info(h.device).early_launch, warps, 1),
    )
