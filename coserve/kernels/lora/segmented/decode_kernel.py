"""Segmented LoRA for decode: tiles of a few rows of one adapter. The time goes into reading the weights.

    shrink  h[split, site, t, r] = Σ_{k in split} A_site[r, k] x[t, k]        split over k: all multiprocessors read
    expand  y_site[t, o] += scaling Σ_r B_site[o, r] (Σ_split h[split, site, t, r])

Two launches serve all the sites that read one input. Tokens are the narrow side of each product: a tensor core takes 8
of them, but 16 rows of weights. A tile of the shrink's result would keep only one warp busy, so its sum over k is split
once more: each warp sums a chunk of k, and the partial sums are added at the end.

A kernel may start while the preceding one still runs (programmatic dependent launch): it reads tables and its first
weights, which do not depend on that kernel, into registers, and then waits (`loads.waits`).

Fully sharded pairs: `SHARDS` GPUs hold equal shards of A's ranks, in order, and h has a leading dimension of shards. A
GPU's shrink computes its own shard, the expand reads all of them; between the two launches the GPUs exchange them
(`exchange`).

For a block-diagonal matrix only the blocks are stored and read: a tile reads the blocks that contain its ranks or
outputs, mostly one. `BLOCKED`: the table may hold such pairs. Dense ones have a path of their own in the same kernel.

x: (T, D); y: (T, O); h: (SHARDS, splits, G, T, R / SHARDS) fp32, `R` is its last dimension; items, tiles: (N, 4) int32;
addresses: (slots, G, 2) int64; ranks: (slots, G) int32, `TableEntry.shape`; scalings: (slots, G) fp32; `row` is the
distance in entries from one slot to the next.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.lora.segmented.loads import (
    a_blocks,
    a_rows,
    b_blocks,
    b_rows,
    h_columns,
    h_ranks,
    held,
    load_b_rows,
    output,
    rank_of,
    waits,
    weights,
    within,
)


@triton.jit(do_not_specialize=["row", "T", "own_shard"], do_not_specialize_on_alignment=["ranks_ptr"])
def shrink(
    x_ptr,
    h_ptr,
    items_ptr,
    addresses_ptr,
    ranks_ptr,
    D,
    x_stride,
    row,
    T,
    R,
    own_shard,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    BLOCKED: tl.constexpr,
    SHARDS: tl.constexpr,
    FILL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (items, splits, sites). `SHARDS`: `ranks` counts the ranks of all shards. `FILL`: h has all shards, and this
    kernel writes its own, `own_shard`, and zeros into the others; otherwise h is its own shard.

    `OVERLAPPED`: the preceding kernel is a GEMM of x that allows early launch once it has itself waited for x, and it
    does not write h's memory. So x is complete and is read at once, bypassing L1. The wait at the end is for the GEMM's
    end.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    item_ptr = items_ptr + tl.program_id(0) * 4
    split = tl.program_id(1)
    site = tl.program_id(2)
    start = tl.load(item_ptr)
    rows = tl.load(item_ptr + 1)
    entry = tl.load(item_ptr + 2) * row + site
    first = tl.load(item_ptr + 3) * BLOCK_R
    shape = tl.load(ranks_ptr + entry)
    rank = rank_of(shape)
    if SHARDS > 1:
        rank = rank // SHARDS
    a_ptr = weights(addresses_ptr, entry, 0, x_ptr)  # loaded before the branch, so that latencies overlap
    if (rows == 0) | (first >= rank):
        if PDL and waits(True):
            tl.extra.cuda.gdc_wait()
        return
    t = tl.arange(0, BLOCK_T)
    r = first + tl.arange(0, BLOCK_R)
    width: tl.constexpr = BLOCK_K // PARTS
    part = tl.arange(0, PARTS)[:, None, None] * width + tl.arange(0, width)[None, None, :]
    k = split * STEPS * BLOCK_K + part
    x_at = x_ptr + (start + t)[None, :, None] * x_stride + k
    a_real, x_real = (r < rank)[None, :, None], (t < rows)[None, :, None]
    length = D
    own = tl.zeros([BLOCK_R], dtype=tl.int32)
    if BLOCKED:
        packed = 0
        if a_blocks(shape) > 1:
            packed, own = a_rows(shape, r, D)
        own = own // 8 * 8  # repeats a hint that a branch hides from the compiler
        length = tl.where(packed == 0, D, packed // 8 * 8)
    a_at = a_ptr + (r * length - own)[None, :, None] + k
    own = own[None, :, None]
    acc = tl.zeros([PARTS, BLOCK_R, BLOCK_T], dtype=tl.float32)
    if OVERLAPPED:  # a loop, so that all its loads to shared memory are in flight at once
        for step in tl.range(0, STEPS, num_stages=STAGES):
            a_mask = a_real & within(k + step * BLOCK_K, own, length, BLOCKED)
            a = tl.load(a_at + step * BLOCK_K, mask=a_mask, other=0.0)
            x_mask = x_real & (k + step * BLOCK_K < D)
            x = tl.load(x_at + step * BLOCK_K, mask=x_mask, other=0.0, cache_modifier=".cg")
            acc = tl.dot(a, tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")
    else:  # the first A is in registers before the wait
        for step in tl.static_range(STEPS):
            a_mask = a_real & within(k + step * BLOCK_K, own, length, BLOCKED)
            a = tl.load(a_at + step * BLOCK_K, mask=a_mask, other=0.0)
            if PDL and step == 0:
                tl.extra.cuda.gdc_wait()
                a = held(a)
            x = tl.load(x_at + step * BLOCK_K, mask=x_real & (k + step * BLOCK_K < D), other=0.0)
            acc = tl.dot(a, tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")
    h_at = h_ptr + ((split * tl.num_programs(2) + site) * T + start + t)[None, :] * R + r[:, None]
    h_mask = (t < rows)[None, :] & (r < h_ranks(rank, SHARDS))[:, None]
    total = tl.sum(acc, 0)
    if FILL:
        for shard in tl.static_range(SHARDS):
            h_shard = h_at + shard * tl.num_programs(1) * tl.num_programs(2) * T * R
            tl.store(h_shard, tl.where(shard == own_shard, total, 0.0), mask=h_mask)
    else:
        tl.store(h_at, total, mask=h_mask)
    if PDL and OVERLAPPED and waits(True):
        tl.extra.cuda.gdc_wait()


@triton.jit
def _h(h_at, stride, r, rank, keep, SPLITS: tl.constexpr, SHARDS: tl.constexpr):
    """Load h[t, r]: the sum of its splits, in order."""
    mask = keep[:, None] & (r < h_ranks(rank, SHARDS))[None, :]
    if SHARDS > 1 and rank // SHARDS % 8 == 0:
        each = rank // SHARDS // 8 * 8  # a hint for the compiler: whole vectors
        total = _sum(h_at, r // each * (SPLITS * stride) + r % each, stride, mask, SPLITS)
    else:
        total = _sum(h_at, h_columns(r, rank, SPLITS * stride, SHARDS), stride, mask, SPLITS)
    return total


@triton.jit
def _sum(h_at, columns, stride, mask, SPLITS: tl.constexpr):
    total = tl.load(h_at + columns[None, :], mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(h_at + split * stride + columns[None, :], mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["row", "T"], do_not_specialize_on_alignment=["ranks_ptr", "scalings_ptr"])
def expand(
    y0_ptr,
    y1_ptr,
    y2_ptr,
    h_ptr,
    tiles_ptr,
    addresses_ptr,
    ranks_ptr,
    scalings_ptr,
    O0,
    O1,
    O2,
    y0_stride,
    y1_stride,
    y2_stride,
    row,
    T,
    R,
    SITES: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCKED: tl.constexpr,
    SHARDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (output blocks of all sites, tiles)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    ys, strides = (y0_ptr, y1_ptr, y2_ptr), (y0_stride, y1_stride, y2_stride)
    site, block, y_ptr, O, y_stride = output(tl.program_id(0), ys, (O0, O1, O2), strides, SITES, ALIGNED, BLOCK_O)
    start = tl.load(tile_ptr)
    rows = tl.load(tile_ptr + 1)
    entry = tl.load(tile_ptr + 2) * row + site
    shape = tl.load(ranks_ptr + entry)
    rank = rank_of(shape)
    scaling = tl.load(scalings_ptr + entry)
    b_ptr = weights(addresses_ptr, entry, 1, y0_ptr)
    if (rows == 0) | (rank == 0):
        if PDL and waits(True):
            tl.extra.cuda.gdc_wait()
        return
    t = tl.arange(0, BLOCK_T)
    o = block * BLOCK_O + tl.arange(0, BLOCK_O)
    r = tl.arange(0, BLOCK_R)
    y_at = y_ptr + (start + t)[None, :] * y_stride + o[:, None]
    y_mask = (t < rows)[None, :] & (o < O)[:, None]
    keep, stride = t < rows, SITES * T * R
    h_at = h_ptr + (site * T + start + t)[:, None] * R
    length = (rank + 7) // 8 * 8
    own = tl.zeros([BLOCK_O], dtype=tl.int32)
    begin = 0
    end = rank
    if BLOCKED:
        if b_blocks(shape) > 1:
            length, own, begin, end = b_rows(shape, o, block * BLOCK_O, BLOCK_O, O)
        length, own, begin = length // 8 * 8, own // 8 * 8, begin // 8 * 8  # repeats the hint
    r = begin + tl.arange(0, BLOCK_R)
    b = load_b_rows(b_ptr, o, r, O, own, length, BLOCKED)
    if not SINGLE:
        b_next = load_b_rows(b_ptr, o, BLOCK_R + r, O, own, length, BLOCKED)
    if PDL:
        tl.extra.cuda.gdc_wait()
    y = tl.load(y_at, mask=y_mask, other=0.0)
    h = _h(h_at, stride, r, end, keep, SPLITS, SHARDS)
    if not SINGLE:
        h_next = _h(h_at, stride, BLOCK_R + r, end, keep, SPLITS, SHARDS)
    if PDL:  # all loads in flight at once: one latency
        h = held(h)
        if not SINGLE:
            h_next = held(h_next)
        y = held(y)
    acc = tl.zeros([BLOCK_O, BLOCK_T], dtype=tl.float32)
    acc = tl.dot(b, tl.trans(h.to(b.dtype)), acc, input_precision="ieee")
    if not SINGLE:
        if end - begin > BLOCK_R:
            acc = tl.dot(b_next, tl.trans(h_next.to(b.dtype)), acc, input_precision="ieee")
        for first in range(2 * BLOCK_R, end - begin, BLOCK_R):
            b_more = load_b_rows(b_ptr, o, first + r, O, own, length, BLOCKED)
            h_more = _h(h_at, stride, first + r, end, keep, SPLITS, SHARDS)
            if PDL:
                h_more = held(h_more)
            acc = tl.dot(b_more, tl.trans(h_more.to(b.dtype)), acc, input_precision="ieee")
    tl.store(y_at, (y.to(tl.float32) + acc * scaling).to(y.dtype), mask=y_mask)
