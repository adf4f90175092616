"""Launches of the segmented kernels, backward; see `segmented_launch`."""

from __future__ import annotations

import torch
from torch import Tensor

from coserve.kernels import segmented_backward
from coserve.kernels.launcher import Launcher
from coserve.kernels.segmented_launch import (
    LONG,
    MAX_SITES,
    PROGRAMS,
    LongBlocks,
    has_pdl,
    narrow,
    options,
    rank_block,
    splits_of,
)
from coserve.kernels.sizes import cdiv

SHRINK_B, EXPAND_A = Launcher(segmented_backward.shrink_b), Launcher(segmented_backward.expand_a)
OUTER, FOLD = Launcher(segmented_backward.outer), Launcher(segmented_backward.fold)
FOLD_BLOCK = 1024
"""Entries of a matrix whose parts one program sums."""


def from_site(site: int, *tables: Tensor) -> tuple[Tensor, ...]:
    """The columns of a table's parts from one site on; the parts themselves for the first, as a view takes the host time."""
    return tuple([table[:, site:] for table in tables]) if site else tables


def shrink_b(
    dys: list[Tensor],
    tiles: Tensor,
    counters: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    rows: int,
    R: int,
    blocks: LongBlocks | None = None,
) -> Tensor:
    """g (G, T, R) = scaling dy B for each site of a group."""
    blocks = blocks or LONG
    tokens, block_r = dys[0].shape[0], rank_block(R)
    g = torch.empty(len(dys), tokens, R, dtype=dys[0].dtype, device=dys[0].device)
    k = narrow(blocks.k, block_r, g)
    rank_blocks = cdiv(R, block_r)
    for site, dy in enumerate(dys):
        splits, steps = splits_of(tiles.shape[0] * rank_blocks, dy.shape[1], k)
        shape = (splits, tokens, R)
        parts = g[site] if splits == 1 else torch.empty(shape, dtype=torch.float32, device=g.device)
        column = from_site(site, addresses, ranks, scalings)
        SHRINK_B(
            (tiles.shape[0], splits, rank_blocks),
            (dy, g[site], parts, counters, tiles, *column),
            (dy.shape[1], dy.stride(0), ranks.stride(0), tokens * R, R, steps),
            SPLIT=splits > 1,
            BLOCK_T=rows,
            BLOCK_R=block_r,
            BLOCK_K=k,
            **options(blocks.pdl and has_pdl(g.device), blocks.back_warps, blocks.back_stages),
        )
    return g


def expand_a(
    g: Tensor, inputs: int, tiles: Tensor, addresses: Tensor, ranks: Tensor, rows: int, blocks: LongBlocks | None = None
) -> Tensor:
    """dx (T, D) = Σ_site g_site A_site; `tiles` cover every row."""
    blocks = blocks or LONG
    sites, tokens, R = g.shape
    dx = torch.empty(tokens, inputs, dtype=g.dtype, device=g.device)
    block_d = blocks.d if g.element_size() == 2 else blocks.d // 2
    EXPAND_A(
        (cdiv(inputs, block_d), tiles.shape[0], 1),
        (dx, g, tiles, addresses, ranks),
        (inputs, dx.stride(0), ranks.stride(0), tokens, R),
        SITES=sites,
        BLOCK_T=rows,
        BLOCK_R=rank_block(R),
        BLOCK_D=block_d,
        **options(blocks.pdl and has_pdl(g.device), blocks.d_warps, 1),
    )
    return dx


def outer(
    u_TN: Tensor,
    v: Tensor,
    totals: list[int],
    tiles: Tensor,
    spans: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    starts: Tensor,
    rows: int,
    *,
    of_b: bool,
    sums: Tensor | None = None,
    blocks: LongBlocks | None = None,
) -> list[Tensor]:
    """dA of each site that reads u = x (`v` is g), or dB of one site (u = dy, `v` its h), adapters one after another.

    `totals` are the sites' ranks summed over slots; each result is flat, `totals * N` long. With `sums`
    (`SiteTable.sums`) there is none: it is added there.
    """
    blocks = blocks or LONG
    sites, tokens, R = v.shape
    width, block_r = u_TN.shape[1], rank_block(R)
    block_n = blocks.outer_n if u_TN.element_size() == 2 else blocks.outer_n // 2
    rank_blocks, wide = cdiv(R, block_r), cdiv(width, block_n)
    adapters, warps = spans.shape[0], 8 if sites > 1 and block_r > 32 else blocks.outer_warps
    parts = max(1, min(PROGRAMS // (wide * adapters * rank_blocks), tiles.shape[0] // adapters // 2))
    full, add = adapters == ranks.shape[0], sums is not None and parts == 1
    # A slot without tokens has no gradient.
    new = torch.empty if full or sums is not None else torch.zeros
    dtype = u_TN.dtype if parts == 1 else torch.float32
    outs = [new(parts, 0 if add else total * width, dtype=dtype, device=u_TN.device) for total in totals]
    three = [outs[min(site, sites - 1)] for site in range(MAX_SITES)]
    OUTER(
        (wide, adapters, parts * rank_blocks),
        (u_TN, v, *three, tiles, spans, ranks, scalings, starts, starts if sums is None else sums),
        (width, u_TN.stride(0), ranks.stride(0), tokens, R, parts, *(out.stride(0) for out in three)),
        SITES=sites,
        OF_B=of_b,
        ADD=add,
        BLOCK_T=rows,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        **options(blocks.pdl and has_pdl(v.device), warps, blocks.outer_stages),
    )
    if sums is None:
        return [out[0] if parts == 1 else out.sum(0).to(u_TN.dtype) for out in outs]
    for site, out in enumerate(outs if parts > 1 else ()):
        column = from_site(site, ranks, scalings, starts, sums)
        FOLD(
            (cdiv(R * width, FOLD_BLOCK), adapters, 1), (out, spans, *column), (width, ranks.stride(0), parts, out.stride(0)),
            OF_B=of_b, BLOCK=FOLD_BLOCK, **options(blocks.pdl and has_pdl(v.device), 4, 1),
        )  # fmt: skip
    return []
