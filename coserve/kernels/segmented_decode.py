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
    LINES: tl.constexpr,
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
    if (rows == 0) | (first >= rank):
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    a_ptr = weights(addresses_ptr, slot * row + site, 0, x_ptr)
    t = tl.arange(0, BLOCK_T)
    r = first + tl.arange(0, BLOCK_R)
    if PDL:
        if LINES > 0:  # lines of this program's part of A; what lies outside of it asks for an inside line again
            line = tl.arange(0, LINES)
            per_row: tl.constexpr = BLOCK_K * STEPS // 64
            line_r = tl.minimum(first + line // per_row, rank - 1)
            line_k = tl.minimum(split * STEPS * BLOCK_K + line % per_row * 64, D - 64)
            ask_for(a_ptr + line_r * D + line_k)
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
    LINES: tl.constexpr,
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
    if SITES > 1 and block >= tl.cdiv(O0, BLOCK_O):
        block -= tl.cdiv(O0, BLOCK_O)
        site = 1
        O = O1
        y_stride = y1_stride
        y_address = y1_ptr.to(tl.int64)
        if SITES > 2 and block >= tl.cdiv(O1, BLOCK_O):
            block -= tl.cdiv(O1, BLOCK_O)
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
    if (rows == 0) | (rank == 0):
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    b_ptr = weights(addresses_ptr, slot * row + site, 1, y0_ptr)
    if PDL:
        if LINES > 0:
            stride = (rank + 7) // 8 * 8
            line = tl.arange(0, LINES) * 64
            for at in range(0, BLOCK_O * stride, LINES * 64):
                ask_for(b_ptr + tl.minimum(block * BLOCK_O * stride + at + line, O * stride - 64))
        tl.extra.cuda.gdc_wait()
    t = tl.arange(0, BLOCK_T)
    o = block * BLOCK_O + tl.arange(0, BLOCK_O)
    y_at = y_ptr + (start + t)[None, :] * y_stride + o[:, None]
    y_mask = (t < rows)[None, :] & (o < O)[:, None]
    y = tl.load(y_at, mask=y_mask, other=0.0)
    split = tl.arange(0, SPLITS_POW2)
    h_at = h_ptr + ((split[:, None] * SITES + site) * T + start + t[None, :])[:, :, None] * R
    acc = tl.zeros([BLOCK_O, BLOCK_T], dtype=tl.float32)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        b = load_b(b_ptr, o, r, O, rank)
        h_mask = (split < SPLITS)[:, None, None] & (t < rows)[None, :, None] & (r < padded(rank))[None, None, :]
        h = tl.sum(tl.load(h_at + r[None, None, :], mask=h_mask, other=0.0), 0)
        acc = tl.dot(b, tl.trans(h.to(b.dtype)), acc, input_precision="ieee")
    tl.store(y_at, (y.to(tl.float32) + acc * scaling).to(y.dtype), mask=y_mask)
