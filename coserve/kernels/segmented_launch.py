"""Launches of the segmented kernels, forward: grids, block sizes, outputs. Sizes were chosen by `benchmarks/kernel_tune`.

What a launch looks like follows from shapes alone, so that the same batch always gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from coserve.kernels import segmented_decode, segmented_prefill
from coserve.kernels.dispatch import interpreted
from coserve.kernels.launcher import Launcher
from coserve.kernels.sizes import cdiv, next_power_of_2
from coserve.kernels.tables import RANK_BLOCK

PROGRAMS = 264
"""As many programs as a long kernel should have at least: two for each of an H200's 132 multiprocessors."""
SHARED_BYTES = 227 * 1024
"""Shared memory that one program may use on sm_90."""
SPLIT_LENGTH = 512
"""Inputs that a program should have at least where they are divided among several; below four times as many they are
not divided: the sum of the parts costs about 2 µs."""
EXPAND_PROGRAMS = 384
"""Programs that the long expand should have before each takes several output blocks."""
WIDE_BLOCKS = 6144
"""From so many output blocks on in all tiles, ranks up to 64 take blocks twice as wide, with twice the warps."""
LOOP_RANK = 128
"""The largest rank whose B streams past a standing h; beyond, each output block takes its ranks in turns."""
MAX_SITES = 3
"""Sites that one launch can serve: q, k and v."""


@dataclass(frozen=True)
class DecodeBlocks:
    """Sizes of the decode kernels."""

    k: int = 1024
    steps: int = 1
    beside_k: int = 512
    """`k` where the shrink runs beside a product: as many steps more, whose loads are all under way at once."""
    parts: int = 4
    """Of a step's k; each has a sum of its own."""
    shrink_warps: int = 4
    beside_warps: int = 2
    """Fewer: the product is what the registers and the shared memory are for."""
    o: int = 256
    r: int = RANK_BLOCK
    """Ranks of the expand at a time."""
    expand_warps: int = 4
    pdl: bool = True


@dataclass(frozen=True)
class LongBlocks:
    """Sizes of the prefill and training kernels."""

    k: int = 128
    """Of x at a time; half where ranks are more than 32."""
    shrink_stages: int = 6
    """For ranks of 33 to 64, which leave room: a third more."""
    shrink_programs: int = PROGRAMS // 2
    shrink_r: int = 128
    o: int = 64
    expand_warps: int = 4
    run_blocks: int = 8
    run_stages: int = 3
    """For ranks of more than 64: one more."""
    single_r: int = 64
    single_stages: int = 2
    back_warps: int = 8
    back_stages: int = 4
    d: int = 128
    d_warps: int = 4
    outer_n: int = 128
    outer_warps: int = 4
    outer_stages: int = 3
    pdl: bool = True


MANY_SHRINKS = 512
"""Programs of the decode shrink from which each takes two steps of k: the start of a program then costs more than its wait."""
FEW_EXPANDS = 512
"""Programs of 128 outputs up to which those of the decode expand are made small, so that there are more of them, with more
ranks each: what they wait for is their loads. Beyond, programs hide that from each other."""
AHEAD = 3
"""Steps of the decode shrink whose loads are under way at once, where it runs beside a product."""
LONG = LongBlocks()
DECODE_SHRINK, DECODE_EXPAND = Launcher(segmented_decode.shrink), Launcher(segmented_decode.expand)
LONG_SHRINK, LONG_EXPAND = Launcher(segmented_prefill.shrink), Launcher(segmented_prefill.expand)


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether a kernel may start before its predecessor has ended (sm_90 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def options(pdl: bool, warps: int, stages: int) -> dict[str, int | bool]:
    """What every launch says of its kernel's form."""
    found: dict[str, int | bool] = {"num_warps": warps, "num_stages": stages, "PDL": pdl}
    return found if interpreted() else {**found, "launch_pdl": pdl}


@lru_cache(4096)
def decode_blocks(inputs: int, outputs: tuple[int, ...], tiles: int, items: int, rows: int, R: int) -> DecodeBlocks:
    """The sizes for so many tiles, of so many rows each, at sites of so many inputs and outputs."""
    start = DecodeBlocks()
    steps = 2 if items * len(outputs) * cdiv(inputs, start.k) > MANY_SHRINKS else 1
    programs = tiles * sum(cdiv(width, 128) for width in outputs)
    if R <= RANK_BLOCK:
        o = 64 if programs <= FEW_EXPANDS else 128 if programs <= 2 * FEW_EXPANDS else 256
        return replace(start, steps=steps, o=o)
    if programs <= FEW_EXPANDS:
        return replace(start, steps=steps, o=64, r=rank_block(R), expand_warps=2 if rows <= 8 else 4)
    return replace(start, steps=steps, r=rank_block(R, 32))


def decode_splits(inputs: int, blocks: DecodeBlocks) -> int:
    """How many parts the decode shrink divides D `inputs` into."""
    return cdiv(inputs, blocks.k * blocks.steps)


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
    *,
    beside: bool = False,
) -> None:
    """Adds into the ys of up to three sites that read x. `beside`: see `segmented_decode.shrink`."""
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
    sums = {"SITES": sites, "SPLITS": splits, "ALIGNED": _aligned(ys)}
    table, row, pdl = (addresses, ranks), ranks.stride(0), blocks.pdl and has_pdl(x_TD.device)
    DECODE_SHRINK(
        (items.shape[0], splits, sites), (x_TD, h, items, *table), (inputs, x_TD.stride(0), row, tokens, R),
        BLOCK_T=rows, BLOCK_R=RANK_BLOCK, **shrink_steps(blocks, beside=beside),
        **options(pdl, blocks.beside_warps if beside else blocks.shrink_warps, 1),
    )  # fmt: skip
    DECODE_EXPAND(
        (output_blocks, tiles.shape[0], 1), (*three, h, tiles, *table, scalings), (*widths, *strides, row, tokens, R), **sums,
        BLOCK_T=rows, BLOCK_R=block_r, BLOCK_O=blocks.o, SINGLE=block_r >= R, **options(pdl, blocks.expand_warps, 1),
    )  # fmt: skip


def shrink_steps(blocks: DecodeBlocks, *, beside: bool) -> dict[str, int | bool]:
    """How a program of the decode shrink goes through its inputs."""
    k, steps = blocks.k, blocks.steps
    if beside:
        k, steps = blocks.beside_k, blocks.k * blocks.steps // blocks.beside_k
    return {"BLOCK_K": k, "STEPS": steps, "PARTS": blocks.parts, "STAGES": min(steps, AHEAD) + 1, "BESIDE": beside}


@cache
def rank_block(R: int, most: int = 64) -> int:
    """Ranks that one program of a long kernel works on together."""
    return min(most, max(RANK_BLOCK, next_power_of_2(R)))


def splits_of(programs: int, length: int, block: int, wanted: int = PROGRAMS) -> tuple[int, int]:
    """(splits, blocks in each) of a sum over `length`: enough programs to fill the chip, and enough work in each."""
    blocks = cdiv(length, block)
    most = length // SPLIT_LENGTH if length >= 4 * SPLIT_LENGTH else 1
    splits = max(1, min(wanted // max(programs, 1), most))
    steps = cdiv(blocks, splits)
    return cdiv(blocks, steps), steps


def long_forward(
    ys: list[Tensor],
    outs: list[Tensor],
    x_TD: Tensor,
    tiles: Tensor,
    counters: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    rows: int,
    R: int,
    *,
    keep: bool,
    blocks: LongBlocks | None = None,
) -> Tensor:
    """`out = y + scaling (x Aᵀ) Bᵀ` for up to three sites that read x; `outs` may be `ys`.

    With `keep` returns h (G, T, R) in x's dtype, of which only a slot's own ranks are written.
    """
    blocks = blocks or LONG
    where = (tiles, addresses, ranks, scalings, rows)
    block_o, run, _ = _run(ys, tiles, R, blocks)
    splits, _, _, _ = _shrink_cut(x_TD, tiles, len(ys), R, blocks)
    if splits == 1 or run == 1 or splits * R > run * block_o:  # nothing to sum, or too much for so little of y
        h = long_shrink(x_TD, tiles, counters, addresses, ranks, rows, R, blocks)
        long_expand(ys, outs, h, *where, blocks=blocks)
        return h
    parts = long_shrink(x_TD, tiles, counters, addresses, ranks, rows, R, blocks, finish=False)
    kept = torch.empty(parts.shape[1:], dtype=x_TD.dtype, device=x_TD.device) if keep else None
    long_expand(ys, outs, parts, *where, kept=kept, blocks=blocks)
    return parts if kept is None else kept


def _shrink_cut(x_TD: Tensor, tiles: Tensor, sites: int, R: int, blocks: LongBlocks) -> tuple[int, int, int, int]:
    """(splits of k, blocks of k in each, their size, ranks of a program) of a long shrink."""
    # Where programs are few anyway, more of them read x: a long rank's turns through k would be all that is waited for.
    few = tiles.shape[0] * cdiv(R, 64) <= blocks.shrink_programs
    block_r = rank_block(R, 64 if few else blocks.shrink_r)
    k = narrow(blocks.k, block_r, x_TD)
    programs = tiles.shape[0] * cdiv(R, block_r)
    return *splits_of(programs, x_TD.shape[1], k, blocks.shrink_programs), k, block_r


def long_shrink(
    x_TD: Tensor,
    tiles: Tensor,
    counters: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    rows: int,
    R: int,
    blocks: LongBlocks | None = None,
    *,
    finish: bool = True,
) -> Tensor:
    """h (G, T, R) in x's dtype, or without `finish` its parts (splits, G, T, R) fp32; only a slot's own ranks are written."""
    blocks = blocks or LONG
    tokens, inputs = x_TD.shape
    sites, pdl = ranks.shape[1], blocks.pdl and has_pdl(x_TD.device)
    splits, steps, k, block_r = _shrink_cut(x_TD, tiles, sites, R, blocks)
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
    LONG_SHRINK(
        (tiles.shape[0], splits, cdiv(R, block_r)), (x_TD, h, parts, counters, tiles, addresses, ranks),
        (inputs, x_TD.stride(0), ranks.stride(0), tokens, R, steps), SITES=sites, SPLIT=finish and splits > 1, BLOCK_T=rows, BLOCK_R=block_r,
        BLOCK_K=k, **options(pdl, warps, min(stages, SHARED_BYTES // stage)),
    )  # fmt: skip
    return h


def narrow(k: int, block_r: int, like: Tensor) -> int:
    """A block of k that still fits in shared memory where ranks or elements are wide."""
    return max(16, k // (2 if block_r > 32 else 1) // (2 if like.element_size() == 4 else 1))


def run_length(tiles: int, output_blocks: int, R: int, blocks: LongBlocks) -> int:
    """Output blocks of a program of the long expand: a power of two; one where programs are few or ranks too large."""
    if R > LOOP_RANK:
        return 1
    many = max(1, tiles * output_blocks // EXPAND_PROGRAMS)
    return min(blocks.run_blocks, 1 << (many.bit_length() - 1))


def _run(ys: Sequence[Tensor], tiles: Tensor, R: int, blocks: LongBlocks) -> tuple[int, int, int]:
    """(size of an output block, blocks of a program, its warps) of a long expand."""
    size, warps = blocks.o // (2 if ys[0].element_size() == 4 else 1), blocks.expand_warps
    count = sum(cdiv(y.shape[1], size) for y in ys)
    if R <= 64 and tiles.shape[0] * count >= WIDE_BLOCKS:
        size, warps = 2 * size, 2 * warps
        count = sum(cdiv(y.shape[1], size) for y in ys)
    return size, run_length(tiles.shape[0], count, R, blocks), warps


def long_expand(
    ys: list[Tensor],
    outs: list[Tensor],
    h: Tensor,
    tiles: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    rows: int,
    *,
    kept: Tensor | None = None,
    blocks: LongBlocks | None = None,
) -> None:
    """`out = y + scaling h Bᵀ` for up to three sites in one launch; `outs` may be `ys`.

    h: (G, T, R), or its parts (splits, G, T, R), whose sum is written to `kept`; parts need runs (`long_forward`).
    """
    blocks = blocks or LONG
    sites, tokens, R = h.shape[-3:]
    assert sites == len(ys) <= MAX_SITES, f"expected the table's sites, {MAX_SITES} at most, got {len(ys)}"
    if not tiles.shape[0] or not tokens:
        return
    three, fresh = ([each[min(site, sites - 1)] for site in range(MAX_SITES)] for each in (ys, outs))
    block_o, run, warps = _run(ys, tiles, R, blocks)
    if run == 1:
        assert h.dim() == 3, "expected whole h where a program has one output block"
        block_r, stages = rank_block(R, blocks.single_r), blocks.single_stages
    else:
        block_r, stages = rank_block(R, LOOP_RANK), blocks.run_stages + (R > 64)
    LONG_EXPAND(
        (sum(cdiv(y.shape[1], block_o * run) for y in ys), tiles.shape[0], 1),
        (*three, *fresh, h, h if kept is None else kept, tiles, addresses, ranks, scalings),
        (*(y.shape[1] for y in three), *(y.stride(0) for y in (*three, *fresh)), ranks.stride(0), tokens, R), SITES=sites, ALIGNED=_aligned([*ys, *outs]),
        PARTS=h.shape[0] if h.dim() == 4 else 1, KEEP=kept is not None, BLOCK_T=rows, BLOCK_R=block_r,
        BLOCK_O=block_o, BLOCKS=run, STAGES=stages, **options(blocks.pdl and has_pdl(h.device), warps, 1),
    )  # fmt: skip


def _aligned(ys: list[Tensor]) -> bool:
    """Whether every row of every output can be read and written 16 bytes at a time."""
    return all(y.stride(0) % 8 == 0 and y.shape[1] % 8 == 0 and y.data_ptr() % 16 == 0 for y in ys)
