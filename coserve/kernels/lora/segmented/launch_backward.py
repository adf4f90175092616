"""Launches of the segmented kernels, backward; see `launch_prefill`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.kernels.gpu.device import device_info
from coserve.kernels.gpu.launcher import Launcher, options
from coserve.kernels.gpu.rounding import cdiv
from coserve.kernels.lora.segmented import backward_kernel
from coserve.kernels.lora.segmented.adapter_table import SiteTable
from coserve.kernels.lora.segmented.block_sizes import (
    MAX_SITES,
    PROGRAMS,
    narrow,
    rank_block,
    splits_of,
)
from coserve.kernels.lora.segmented.plan import TilePlan

SHRINK_B, EXPAND_A = Launcher(backward_kernel.shrink_b), Launcher(backward_kernel.expand_a)
OUTER, FOLD = Launcher(backward_kernel.outer), Launcher(backward_kernel.fold)
FOLD_BLOCK, FOLD_PARTS = 256, 8
"""Entries of a matrix that one program sums, and partial sums that it loads at once."""


def _columns(table: SiteTable) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs of the kernels that sum gradients: ranks, scalings, starts, addresses of sums."""
    assert table.starts is not None and table.sums is not None, "expected a table made for training"
    return table.ranks, table.scalings, table.starts, table.sums


def _programs(like: Tensor) -> int:
    """Fewest programs that a kernel on this device should have."""
    return PROGRAMS * device_info(like.device).multiprocessors


def shrink_b(dys: Sequence[Tensor], plan: TilePlan, table: SiteTable) -> Tensor:
    """Return g (G, T, R) = scaling dy B for each site of a group."""
    blocks = plan.prefill
    tiles, rows, R, ranks = plan.tiles.tiles, plan.tiles.rows, plan.R, table.ranks
    tokens, block_r = dys[0].shape[0], rank_block(R)
    g = torch.empty(len(dys), tokens, R, dtype=dys[0].dtype, device=dys[0].device)
    k = narrow(blocks.k, block_r, g)
    rank_blocks = cdiv(R, block_r)
    for site, dy in enumerate(dys):
        splits, steps = splits_of(tiles.shape[0] * rank_blocks, dy.shape[1], k, _programs(g), blocks.split_length)
        shape = (splits, tokens, R)
        parts = g[site] if splits == 1 else torch.empty(shape, dtype=torch.float32, device=g.device)
        own = table.from_site(site)
        SHRINK_B(
            (tiles.shape[0], splits, rank_blocks),
            (dy, g[site], parts, plan.tiles.counters, tiles, own.addresses, own.ranks, own.scalings),
            (dy.shape[1], dy.stride(0), ranks.stride(0), tokens * R, R, steps),
            SPLIT=splits > 1,
            BLOCK_T=rows,
            BLOCK_R=block_r,
            BLOCK_K=k,
            BLOCKED=table.blocked,
            **options(blocks.pdl and device_info(g.device).early_launch, blocks.back_warps, blocks.back_stages),
        )
    return g


def expand_a(g: Tensor, inputs: int, plan: TilePlan, table: SiteTable) -> Tensor:
    """Return dx (T, D) = Σ_site g_site A_site; the plan's tiles cover every row."""
    blocks = plan.prefill
    tiles, rows, ranks = plan.tiles.tiles, plan.tiles.rows, table.ranks
    sites, tokens, R = g.shape
    dx = torch.empty(tokens, inputs, dtype=g.dtype, device=g.device)
    block_d = blocks.d if g.element_size() == 2 else blocks.d // 2
    EXPAND_A(
        (cdiv(inputs, block_d), tiles.shape[0], 1),
        (dx, g, tiles, table.addresses, ranks),
        (inputs, dx.stride(0), ranks.stride(0), tokens, R),
        SITES=sites,
        BLOCK_T=rows,
        BLOCK_R=rank_block(R),
        BLOCK_D=block_d,
        BLOCKED=table.blocked,
        **options(blocks.pdl and device_info(g.device).early_launch, blocks.d_warps, 1),
    )
    return dx


def outer(
    u_TN: Tensor,
    v_GTR: Tensor,
    totals: Sequence[int],
    plan: TilePlan,
    table: SiteTable,
    *,
    of_b: int | None = None,
    into_sums: bool = False,
) -> list[Tensor]:
    """Compute gradients of weights, adapters one after another: dA of every site (u = x, `v_GTR` = g), or dB of one
    site.

    `of_b`: that site's index (u = its dy, `v_GTR` its h); None: dA. `totals` are `GroupTable.a_totals` or one of
    `b_totals`; each result is flat, `totals * N` long. With `into_sums`, the gradients are added to the pairs'
    `MainGrads` and the result is empty.
    """
    blocks = plan.prefill
    tiles, spans, rows = plan.tiles.tiles, plan.tiles.spans, plan.tiles.rows
    table = table.from_site(of_b or 0)
    ranks, scalings, starts, sums = _columns(table)
    sites, tokens, R = v_GTR.shape
    width, block_r = u_TN.shape[1], rank_block(R)
    block_n = blocks.outer_n if u_TN.element_size() == 2 else blocks.outer_n // 2
    rank_blocks, wide = cdiv(R, block_r), cdiv(width, block_n)
    adapters, warps = spans.shape[0], 8 if sites > 1 and block_r > 32 else blocks.outer_warps
    parts = max(1, min(_programs(v_GTR) // (wide * adapters * rank_blocks), tiles.shape[0] // adapters // 2))
    full, add = adapters == ranks.shape[0], into_sums and parts == 1
    # Slots without tokens get no gradient from the kernel, so theirs must start at zero.
    new = torch.empty if full or into_sums else torch.zeros
    dtype = u_TN.dtype if parts == 1 else torch.float32
    outs = [new(parts, 0 if add else total * width, dtype=dtype, device=u_TN.device) for total in totals]
    three = [outs[min(site, sites - 1)] for site in range(MAX_SITES)]
    OUTER(
        (wide, adapters, parts * rank_blocks),
        (u_TN, v_GTR, *three, tiles, spans, ranks, scalings, starts, sums if into_sums else starts),
        (width, u_TN.stride(0), ranks.stride(0), tokens, R, parts, *(out.stride(0) for out in three)),
        SITES=sites,
        OF_B=of_b is not None,
        ADD=add,
        BLOCK_T=rows,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        BLOCKED=table.blocked,
        **options(
            blocks.pdl and device_info(v_GTR.device).early_launch,
            warps,
            blocks.outer_stages + (2 if block_r <= 32 else 0),
        ),
    )
    if not into_sums:
        return [out[0] if parts == 1 else out.sum(0).to(u_TN.dtype) for out in outs]
    if parts > 1:
        _fold(outs, width, R, plan, table, of_b=of_b is not None)
    return []


def _fold(outs: Sequence[Tensor], width: int, R: int, plan: TilePlan, table: SiteTable, *, of_b: bool) -> None:
    """Add up the partial sums of each site's gradients, (parts, totals * `width`), into the pairs' `MainGrads`."""
    spans = plan.tiles.spans
    for site, out in enumerate(outs):
        FOLD(
            (cdiv(R * width, FOLD_BLOCK), spans.shape[0], 1),
            (out, spans, *_columns(table.from_site(site))),
            (width, table.ranks.stride(0), out.shape[0], out.stride(0)),
            OF_B=of_b,
            BLOCK=FOLD_BLOCK,
            PARTS=FOLD_PARTS,
            **options(plan.prefill.pdl and device_info(out.device).early_launch, 4, 1),
        )
