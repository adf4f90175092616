"""Segmented LoRA for decode: tiles of a few rows of one adapter; reading the weights is all the work there is.

    shrink  h[split, site, t, r] = Σ_{k in split} A_site[r, k] x[t, k]        split over k: the whole chip reads
    expand  y_site[t, o] += scaling Σ_r B_site[o, r] (Σ_split h[split, site, t, r])

Two launches for all the sites that read one input. Tokens are the narrow side of each product: a tensor core takes 8
of them, but 16 rows of weights.

A kernel may start while the one ahead still runs (programmatic dependent launch): it reads tables and its first
weights, which do not depend on that kernel, into registers, and then waits (`segmented_load.waits`).

x: (T, D); y: (T, O); h: (splits, G, T, R) fp32; items, tiles: (N, 4) int32; addresses: (slots, G, 2) int64;
ranks: (slots, G) int32; scalings: (slots, G) fp32; `row` is the distance in entries from one slot to the next.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.segmented_load import load_b, output, padded, waits, weights


@triton.jit(do_not_specialize_on_alignment=["ranks_ptr"])
def shrink(
    x_ptr, h_ptr, items_ptr, addresses_ptr, ranks_ptr, D, x_stride, row, T, R,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    BESIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (items, splits, sites).

    `BESIDE`: the kernel ahead is a product of x that lets this one start once it has itself waited for x, and h is not in
    memory that it writes. So x is complete: it is read at once, past the L1, and the wait is for the product's end.
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
    rank = tl.load(ranks_ptr + entry)
    a_ptr = weights(addresses_ptr, entry, 0, x_ptr)  # asked for before the branch: one latency, not two
    if (rows == 0) | (first >= rank):
        if PDL and waits(True):
            tl.extra.cuda.gdc_wait()
        return
    t = tl.arange(0, BLOCK_T)
    r = first + tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK_R, BLOCK_T], dtype=tl.float32)
    for step in tl.static_range(STEPS):
        k = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + r[:, None] * D + k[None, :], mask=(r < rank)[:, None] & (k < D)[None, :], other=0.0)
        if PDL and step == 0 and not BESIDE:
            tl.extra.cuda.gdc_wait()
        x_at = x_ptr + (start + t)[:, None] * x_stride + k[None, :]
        x_mask = (t < rows)[:, None] & (k < D)[None, :]
        x = tl.load(x_at, mask=x_mask, other=0.0, cache_modifier=".cg" if BESIDE else "")
        acc = tl.dot(a, tl.trans(x), acc, input_precision="ieee")
    h_at = h_ptr + ((split * tl.num_programs(2) + site) * T + start + t)[None, :] * R + r[:, None]
    tl.store(h_at, acc, mask=(t < rows)[None, :] & (r < padded(rank))[:, None])
    if PDL and BESIDE and waits(True):
        tl.extra.cuda.gdc_wait()


@triton.jit
def _h(h_at, r, rank, mask):
    """h[t, r], its splits summed."""
    parts = tl.load(h_at + r[None, None, :], mask=mask & (r < padded(rank))[None, None, :], other=0.0)
    return tl.sum(parts, 0)


@triton.jit(do_not_specialize_on_alignment=["ranks_ptr", "scalings_ptr"])
def expand(
    y0_ptr, y1_ptr, y2_ptr, h_ptr, tiles_ptr, addresses_ptr, ranks_ptr, scalings_ptr,
    O0, O1, O2, y0_stride, y1_stride, y2_stride, row, T, R,
    SITES: tl.constexpr, SPLITS: tl.constexpr, SPLITS_POW2: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (output blocks of all sites, tiles)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    site, block, y_ptr, O, y_stride = output(
        tl.program_id(0), y0_ptr, y1_ptr, y2_ptr, O0, O1, O2, y0_stride, y1_stride, y2_stride, SITES, ALIGNED, BLOCK_O
    )
    start = tl.load(tile_ptr)
    rows = tl.load(tile_ptr + 1)
    entry = tl.load(tile_ptr + 2) * row + site
    rank = tl.load(ranks_ptr + entry)
    scaling = tl.load(scalings_ptr + entry)
    b_ptr = weights(addresses_ptr, entry, 1, y0_ptr)
    if (rows == 0) | (rank == 0):
        if PDL and waits(True):
            tl.extra.cuda.gdc_wait()
        return
    t = tl.arange(0, BLOCK_T)
    o = block * BLOCK_O + tl.arange(0, BLOCK_O)
    r = tl.arange(0, BLOCK_R)
    b = load_b(b_ptr, o, r, O, rank)
    if not SINGLE:
        b_next = load_b(b_ptr, o, BLOCK_R + r, O, rank)
    if PDL:
        tl.extra.cuda.gdc_wait()
    y_at = y_ptr + (start + t)[None, :] * y_stride + o[:, None]
    y_mask = (t < rows)[None, :] & (o < O)[:, None]
    y = tl.load(y_at, mask=y_mask, other=0.0)
    split = tl.arange(0, SPLITS_POW2)
    h_at = h_ptr + ((split[:, None] * SITES + site) * T + start + t[None, :])[:, :, None] * R
    h_mask = (split < SPLITS)[:, None, None] & (t < rows)[None, :, None]
    h = _h(h_at, r, rank, h_mask).to(b.dtype)
    acc = tl.zeros([BLOCK_O, BLOCK_T], dtype=tl.float32)
    acc = tl.dot(b, tl.trans(h), acc, input_precision="ieee")
    if not SINGLE:
        if rank > BLOCK_R:
            h = _h(h_at, BLOCK_R + r, rank, h_mask).to(b.dtype)
            acc = tl.dot(b_next, tl.trans(h), acc, input_precision="ieee")
        for first in range(2 * BLOCK_R, rank, BLOCK_R):
            h = _h(h_at, first + r, rank, h_mask).to(b.dtype)
            acc = tl.dot(load_b(b_ptr, o, first + r, O, rank), tl.trans(h), acc, input_precision="ieee")
    tl.store(y_at, (y.to(tl.float32) + acc * scaling).to(y.dtype), mask=y_mask)
