"""Segmented LoRA for decode: tiles of a few rows of one adapter; reading the weights is all the work there is.

    shrink  h[split, site, t, r] = Σ_{k in split} A_site[r, k] x[t, k]        split over k: the whole chip reads
    expand  y_site[t, o] += scaling Σ_r B_site[o, r] (Σ_split h[split, site, t, r])

Weights do not depend on the kernel ahead, so each kernel has them fetched into the L2 before it waits for that kernel
to end (programmatic dependent launch). Every program waits, idle ones too: a kernel's end implies its predecessors'.
Tokens are the narrow side of each product (a tensor core takes 8 of them, but 16 rows of weights).

x: (T, D); y: (T, O); h: (splits, G, T, R) fp32; items, tiles: (N, 4) int32; addresses: (slots, G, 2) int64;
ranks: (slots, G) int32; scalings: (slots, G) fp32; `row` is the distance in entries from one slot to the next.
"""

# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.segmented_load import ask_for, load_b, padded, weights


@triton.jit(do_not_specialize_on_alignment=["ranks_ptr"])
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
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    FETCH: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    item_ptr = items_ptr + tl.program_id(0) * 4
    split = tl.program_id(1)
    site = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.load(item_ptr)
    rows = tl.load(item_ptr + 1)
    slot = tl.load(item_ptr + 2)
    first = tl.load(item_ptr + 3) * BLOCK_R
    rank = tl.load(ranks_ptr + slot * row + site)
    a_ptr = weights(addresses_ptr, slot * row + site, 0, x_ptr)  # asked for before the branch: one latency, not two
    if (rows == 0) | (first >= rank):
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    t = tl.arange(0, BLOCK_T)
    r = first + tl.arange(0, BLOCK_R)
    if FETCH:
        lane = tl.arange(0, 32 * WARPS)
        begin = split * STEPS * BLOCK_K
        size = (tl.minimum(begin + STEPS * BLOCK_K, D) - begin) * 2 + lane * 0
        wanted = (lane < BLOCK_R) & (first + lane < rank)
        ask_for(a_ptr + (first + lane) * D + begin, size, wanted.to(tl.int32))
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_R, BLOCK_T], dtype=tl.float32)
    for step in tl.static_range(STEPS):
        k = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + r[:, None] * D + k[None, :], mask=(r < rank)[:, None] & (k < D)[None, :], other=0.0)
        x_at = x_ptr + (start + t)[:, None] * x_stride + k[None, :]
        x = tl.load(x_at, mask=(t < rows)[:, None] & (k < D)[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(x), acc, input_precision="ieee")
    h_at = h_ptr + ((split * tl.num_programs(2) + site) * T + start + t)[None, :] * R + r[:, None]
    tl.store(h_at, acc, mask=(t < rows)[None, :] & (r < padded(rank))[:, None])


@triton.jit(do_not_specialize_on_alignment=["ranks_ptr", "scalings_ptr"])
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
    SPLITS_POW2: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCKS: tl.constexpr,
    SINGLE: tl.constexpr,
    FETCH: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)  # the sites' outputs side by side
    site = 0
    O = O0
    y_stride = y0_stride
    y_address = y0_ptr.to(tl.int64)
    if SITES > 1 and block >= tl.cdiv(O0, BLOCK_O * BLOCKS):
        block -= tl.cdiv(O0, BLOCK_O * BLOCKS)
        site = 1
        O = O1
        y_stride = y1_stride
        y_address = y1_ptr.to(tl.int64)
        if SITES > 2 and block >= tl.cdiv(O1, BLOCK_O * BLOCKS):
            block -= tl.cdiv(O1, BLOCK_O * BLOCKS)
            site = 2
            O = O2
            y_stride = y2_stride
            y_address = y2_ptr.to(tl.int64)
    y_ptr = y_address.to(y0_ptr.dtype)
    if ALIGNED:  # said again, since a choice among sites hides it from the compiler
        y_ptr = tl.multiple_of(y_ptr, 16)
        y_stride = y_stride // 8 * 8
        O = O // 8 * 8
    start = tl.load(tile_ptr)
    rows = tl.load(tile_ptr + 1)
    slot = tl.load(tile_ptr + 2)
    rank = tl.load(ranks_ptr + slot * row + site)
    scaling = tl.load(scalings_ptr + slot * row + site)
    b_ptr = weights(addresses_ptr, slot * row + site, 1, y0_ptr)
    if (rows == 0) | (rank == 0):
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    if FETCH:
        lane = tl.arange(0, 32 * WARPS)
        stride = (rank + 7) // 8 * 8
        begin = block * BLOCKS * BLOCK_O
        size = (tl.minimum(begin + BLOCKS * BLOCK_O, O) - begin) * stride * 2 + lane * 0
        ask_for(b_ptr + begin * stride + lane * 0, size, (lane == 0).to(tl.int32))
    if PDL:
        tl.extra.cuda.gdc_wait()
    t = tl.arange(0, BLOCK_T)
    r = tl.arange(0, BLOCK_R)
    split = tl.arange(0, SPLITS_POW2)
    h_at = h_ptr + ((split[:, None] * SITES + site) * T + start + t[None, :])[:, :, None] * R
    h_mask = (split < SPLITS)[:, None, None] & (t < rows)[None, :, None]
    h_first = _h(h_at, r, rank, h_mask).to(y0_ptr.dtype.element_ty)
    y_at = y_ptr + (start + t)[None, :] * y_stride
    for sub in range(BLOCKS):
        o = (block * BLOCKS + sub) * BLOCK_O + tl.arange(0, BLOCK_O)
        y_mask = (t < rows)[None, :] & (o < O)[:, None]
        y = tl.load(y_at + o[:, None], mask=y_mask, other=0.0)
        acc = tl.zeros([BLOCK_O, BLOCK_T], dtype=tl.float32)
        acc = tl.dot(load_b(b_ptr, o, r, O, rank), tl.trans(h_first), acc, input_precision="ieee")
        if not SINGLE:
            for first in range(BLOCK_R, rank, BLOCK_R):
                h = _h(h_at, first + r, rank, h_mask).to(y0_ptr.dtype.element_ty)
                acc = tl.dot(load_b(b_ptr, o, first + r, O, rank), tl.trans(h), acc, input_precision="ieee")
        tl.store(y_at + o[:, None], (y.to(tl.float32) + acc * scaling).to(y.dtype), mask=y_mask)


@triton.jit
def _h(h_at, r, rank, mask):
    """h[t, r], its splits summed."""
    parts = tl.load(h_at + r[None, None, :], mask=mask & (r < padded(rank))[None, None, :], other=0.0)
    return tl.sum(parts, 0)
