"""Launches of the segmented kernels: grids, block sizes, outputs. Sizes were chosen by `benchmarks/kernels.py --tune`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from coserve.kernels import segmented_backward, segmented_decode, segmented_prefill
from coserve.kernels.dispatch import interpreted
from coserve.kernels.tables import RANK_BLOCK

PROGRAMS = 264
"""As many programs as a long kernel should have at least: two for each of an H200's 132 multiprocessors."""
SHARED_BYTES = 227 * 1024
"""Shared memory that one program may use on sm_90."""
MAX_SITES = 3
"""Sites that one launch can serve: q, k and v."""


@dataclass(frozen=True)
class DecodeBlocks:
    """Sizes of the decode kernels."""

    k: int = 512
    steps: int = 2
    shrink_warps: int = 4
    o: int = 256
    expand_warps: int = 4
    pdl: bool = True


@dataclass(frozen=True)
class LongBlocks:
    """Sizes of the prefill and training kernels."""

    k: int = 128
    shrink_warps: int = 8
    shrink_stages: int = 6
    shrink_programs: int = PROGRAMS // 2
    back_stages: int = 4
    o: int = 64
    expand_warps: int = 4
    d: int = 128
    outer_n: int = 128
    outer_warps: int = 4
    outer_stages: int = 3
    pdl: bool = True


DECODE = DecodeBlocks()
DECODE_TALL = DecodeBlocks(shrink_warps=2, expand_warps=8)
"""For tiles of more than 8 rows."""
LONG = LongBlocks()


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether a kernel may start before its predecessor has ended (sm_90 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _options(pdl: bool, warps: int, stages: int) -> dict[str, int | bool]:
    options: dict[str, int | bool] = {"num_warps": warps, "num_stages": stages, "PDL": pdl}
    return options if interpreted() else {**options, "launch_pdl": pdl}


def decode_splits(inputs: int, blocks: DecodeBlocks = DECODE) -> int:
    """How many parts the decode shrink divides D `inputs` into."""
    return int(triton.cdiv(inputs, blocks.k * blocks.steps))


def decode(
    ys: list[Tensor],
    x_TD: Tensor,
    tiles: Tensor,
    items: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    rows: int,
    R: int,
    blocks: DecodeBlocks | None = None,
) -> None:
    """Adds into the ys of up to three sites that read x."""
    blocks = blocks or (DECODE if rows <= 8 else DECODE_TALL)
    tokens, inputs = x_TD.shape
    sites, splits = len(ys), decode_splits(inputs, blocks)
    assert sites == ranks.shape[1] <= MAX_SITES, f"expected the table's sites, {MAX_SITES} at most, got {sites}"
    if not tiles.shape[0] or not tokens:
        return
    h = torch.empty(splits, sites, tokens, R, dtype=torch.float32, device=x_TD.device)
    three = [ys[min(site, sites - 1)] for site in range(MAX_SITES)]
    widths, strides = [y.shape[1] for y in three], [y.stride(0) for y in three]
    output_blocks = sum(triton.cdiv(y.shape[1], blocks.o) for y in ys)
    cut = {"BLOCK_T": rows, "BLOCK_R": RANK_BLOCK}
    sums = {"SITES": sites, "SPLITS": splits, "SPLITS_POW2": triton.next_power_of_2(splits), "ALIGNED": _aligned(ys)}
    table, row, pdl = (addresses, ranks), ranks.stride(0), blocks.pdl and has_pdl(x_TD.device)
    segmented_decode.shrink[(items.shape[0], splits, sites)](
        x_TD, h, items, *table, inputs, x_TD.stride(0), row, tokens, R, **cut,
        BLOCK_K=blocks.k, STEPS=blocks.steps, **_options(pdl, blocks.shrink_warps, 1),
    )  # fmt: skip
    segmented_decode.expand[(output_blocks, tiles.shape[0])](
        *three, h, tiles, *table, scalings, *widths, *strides, row, tokens, R, **sums, **cut,
        BLOCK_O=blocks.o, SINGLE=R <= RANK_BLOCK, **_options(pdl, blocks.expand_warps, 1),
    )  # fmt: skip


def rank_block(R: int) -> int:
    """Ranks that one program of a long kernel works on together."""
    return min(64, max(RANK_BLOCK, int(triton.next_power_of_2(R))))


def _splits(programs: int, length: int, block: int, wanted: int = PROGRAMS) -> tuple[int, int]:
    """(splits, blocks in each): enough programs to fill the chip, four blocks each at least."""
    blocks = int(triton.cdiv(length, block))
    splits = max(1, min(wanted // max(programs, 1), blocks // 4))
    steps = int(triton.cdiv(blocks, splits))
    return int(triton.cdiv(blocks, steps)), steps


def long_shrink(
    x_TD: Tensor,
    tiles: Tensor,
    counters: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    rows: int,
    R: int,
    blocks: LongBlocks = LONG,
) -> Tensor:
    """h (G, T, R) in x's dtype, unwritten where there is nothing to write."""
    tokens, inputs = x_TD.shape
    sites, block_r, pdl = ranks.shape[1], rank_block(R), blocks.pdl and has_pdl(x_TD.device)
    k = _narrow(blocks.k, block_r, x_TD)
    h = torch.empty(sites, tokens, R, dtype=x_TD.dtype, device=x_TD.device)
    if not tiles.shape[0] or not tokens:
        return h
    rank_blocks = triton.cdiv(R, block_r)
    splits, steps = _splits(tiles.shape[0] * rank_blocks, inputs, k, blocks.shrink_programs)
    stage = (rows + sites * block_r) * k * x_TD.element_size()
    parts = h if splits == 1 else torch.empty(splits, *h.shape, dtype=torch.float32, device=h.device)
    segmented_prefill.shrink[(tiles.shape[0], splits, rank_blocks)](
        x_TD, h, parts, counters, tiles, addresses, ranks, inputs, x_TD.stride(0), ranks.stride(0), tokens, R, steps,
        SITES=sites, SPLIT=splits > 1, BLOCK_T=rows, BLOCK_R=block_r, BLOCK_K=k,
        **_options(pdl, blocks.shrink_warps, min(blocks.shrink_stages, SHARED_BYTES // stage)),
    )  # fmt: skip
    return h


def _narrow(k: int, block_r: int, like: Tensor) -> int:
    """A block of k that still fits in shared memory where ranks or elements are wide."""
    return max(16, k // (2 if block_r > 32 else 1) // (2 if like.element_size() == 4 else 1))


def long_expand(
    ys: list[Tensor],
    outs: list[Tensor],
    h: Tensor,
    tiles: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    rows: int,
    blocks: LongBlocks = LONG,
) -> None:
    """`out = y + scaling h Bᵀ` for up to three sites in one launch; `outs` may be `ys`."""
    sites, tokens, R = h.shape
    assert sites == len(ys) <= MAX_SITES, f"expected the table's sites, {MAX_SITES} at most, got {len(ys)}"
    if not tiles.shape[0] or not tokens:
        return
    three, fresh = ([each[min(site, sites - 1)] for site in range(MAX_SITES)] for each in (ys, outs))
    block_r = rank_block(R)
    block_o = blocks.o // (2 if h.element_size() == 4 else 1)
    segmented_prefill.expand[(sum(triton.cdiv(y.shape[1], block_o) for y in ys), tiles.shape[0])](
        *three, *fresh, h, tiles, addresses, ranks, scalings, *(y.shape[1] for y in three),
        *(y.stride(0) for y in three), *(out.stride(0) for out in fresh), ranks.stride(0), tokens, R,
        SITES=sites, ALIGNED=_aligned([*ys, *outs]), BLOCK_T=rows, BLOCK_R=block_r, BLOCK_O=block_o,
        **_options(blocks.pdl and has_pdl(h.device), blocks.expand_warps, 1),
    )  # fmt: skip


def _aligned(ys: list[Tensor]) -> bool:
    """Whether every row of every output can be read and written 16 bytes at a time."""
    return all(y.stride(0) % 8 == 0 and y.shape[1] % 8 == 0 and y.data_ptr() % 16 == 0 for y in ys)


def shrink_b(
    dys: list[Tensor],
    tiles: Tensor,
    counters: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    rows: int,
    R: int,
    blocks: LongBlocks = LONG,
) -> Tensor:
    """g (G, T, R) = scaling dy B for each site of a group."""
    tokens, block_r = dys[0].shape[0], rank_block(R)
    g = torch.empty(len(dys), tokens, R, dtype=dys[0].dtype, device=dys[0].device)
    k = _narrow(blocks.k, block_r, g)
    rank_blocks = triton.cdiv(R, block_r)
    for site, dy in enumerate(dys):
        splits, steps = _splits(tiles.shape[0] * rank_blocks, dy.shape[1], k)
        shape = (splits, tokens, R)
        parts = g[site] if splits == 1 else torch.empty(shape, dtype=torch.float32, device=g.device)
        segmented_backward.shrink_b[(tiles.shape[0], splits, rank_blocks)](
            dy,
            g[site],
            parts,
            counters,
            tiles,
            addresses[:, site:],
            ranks[:, site:],
            scalings[:, site:],
            dy.shape[1],
            dy.stride(0),
            ranks.stride(0),
            tokens * R,
            R,
            steps,
            SPLIT=splits > 1,
            BLOCK_T=rows,
            BLOCK_R=block_r,
            BLOCK_K=k,
            **_options(blocks.pdl and has_pdl(g.device), blocks.shrink_warps, blocks.back_stages),
        )
    return g


def expand_a(
    g: Tensor, inputs: int, tiles: Tensor, addresses: Tensor, ranks: Tensor, rows: int, blocks: LongBlocks = LONG
) -> Tensor:
    """dx (T, D) = Σ_site g_site A_site; `tiles` cover every row."""
    sites, tokens, R = g.shape
    dx = torch.empty(tokens, inputs, dtype=g.dtype, device=g.device)
    block_d = blocks.d if g.element_size() == 2 else blocks.d // 2
    segmented_backward.expand_a[(triton.cdiv(inputs, block_d), tiles.shape[0])](
        dx,
        g,
        tiles,
        addresses,
        ranks,
        inputs,
        dx.stride(0),
        ranks.stride(0),
        tokens,
        R,
        SITES=sites,
        BLOCK_T=rows,
        BLOCK_R=rank_block(R),
        BLOCK_D=block_d,
        **_options(blocks.pdl and has_pdl(g.device), blocks.expand_warps, 1),
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
    blocks: LongBlocks = LONG,
) -> list[Tensor]:
    """dA of each site that reads u = x (`v` is g), or dB of one site (u = dy, `v` its h), adapters one after another.

    `totals` are the sites' ranks summed over slots; each result is flat, `totals * N` long.
    """
    sites, tokens, R = v.shape
    width, block_r = u_TN.shape[1], rank_block(R)
    block_n = blocks.outer_n if u_TN.element_size() == 2 else blocks.outer_n // 2
    rank_blocks, wide = triton.cdiv(R, block_r), triton.cdiv(width, block_n)
    adapters, warps = spans.shape[0], 8 if sites > 1 and block_r > 32 else blocks.outer_warps
    parts = max(1, min(PROGRAMS // (wide * adapters * rank_blocks), tiles.shape[0] // adapters // 2))
    full = adapters == ranks.shape[0]
    new = torch.empty if full else torch.zeros  # a slot without tokens has no gradient
    dtype = u_TN.dtype if parts == 1 else torch.float32
    outs = [new(parts, total * width, dtype=dtype, device=u_TN.device) for total in totals]
    three = [outs[min(site, sites - 1)] for site in range(MAX_SITES)]
    segmented_backward.outer[(wide, adapters, parts * rank_blocks)](
        u_TN,
        v,
        *three,
        tiles,
        spans,
        ranks,
        scalings,
        starts,
        width,
        u_TN.stride(0),
        ranks.stride(0),
        tokens,
        R,
        parts,
        *(out.stride(0) for out in three),
        SITES=sites,
        OF_B=of_b,
        BLOCK_T=rows,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        **_options(blocks.pdl and has_pdl(v.device), warps, blocks.outer_stages),
    )
    return [out[0] if parts == 1 else out.sum(0).to(u_TN.dtype) for out in outs]
