"""Segmented LoRA for decode: tiles of a few rows of one adapter; reading the weights is all the work there is.

    shrink  h[split, site, t, r] = Σ_{k in split} A_site[r, k] x[t, k]        split over k: the whole chip reads
    expand  y_site[t, o] += scaling Σ_r B_site[o, r] (Σ_split h[split, site, t, r])

`fused` does both in one launch for the sites that read one input: as many programs as stay on the chip together take
the units of the shrink in turn, then those of the expand. Before its expand a program asks for its part of B and y,
and then waits for the tile's shrink by a counter that ends at zero again, so that the launch can be replayed.
`shrink` and `expand` are the same units as launches of their own.

Tokens are the narrow side of each product: a tensor core takes 8 of them, but 16 rows of weights. The kernel ahead may
still run when a program starts (programmatic dependent launch); tables and weights are read before its end, x, y and h
after. Every program waits for that end, idle ones too: a kernel's end then implies its predecessors'.

x: (T, D); y: (T, O); h: (splits, G, T, R) fp32; items, tiles: (N, 4) int32; addresses: (slots, G, 2) int64;
ranks: (slots, G) int32; scalings: (slots, G) fp32; counters: (T) int32, zeros; `row` is the distance in entries from
one slot to the next.
"""

# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.segmented_load import ask_for, load_b, output, padded, weights


@triton.jit
def _shrink_unit(
    x_ptr, h_ptr, a_ptr, start, rows, first, rank, part, split, D, x_stride, T, R,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One rank block of one tile at one site, over one split of k; `part` is split * G + site."""
    t = tl.arange(0, BLOCK_T)
    r = first + tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK_R, BLOCK_T], dtype=tl.float32)
    for step in tl.static_range(STEPS):
        k = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + r[:, None] * D + k[None, :], mask=(r < rank)[:, None] & (k < D)[None, :], other=0.0)
        x_at = x_ptr + (start + t)[:, None] * x_stride + k[None, :]
        x = tl.load(x_at, mask=(t < rows)[:, None] & (k < D)[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(x), acc, input_precision="ieee")
    h_at = h_ptr + (part * T + start + t)[None, :] * R + r[:, None]
    tl.store(h_at, acc, mask=(t < rows)[None, :] & (r < padded(rank))[:, None])


@triton.jit
def _h(h_at, r, rank, mask):
    """h[t, r], its splits summed."""
    parts = tl.load(h_at + r[None, None, :], mask=mask & (r < padded(rank))[None, None, :], other=0.0)
    return tl.sum(parts, 0)


@triton.jit
def _expand_unit(
    y_ptr, h_ptr, b_ptr, counter_ptr, expected, start, rows, rank, scaling, site, block, O, y_stride, T, R,
    SITES: tl.constexpr, SPLITS: tl.constexpr, SPLITS_POW2: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, SINGLE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One block of outputs of one tile. `WAIT`: its h is ready once the counter has reached `expected`."""
    t = tl.arange(0, BLOCK_T)
    o = block * BLOCK_O + tl.arange(0, BLOCK_O)
    r = tl.arange(0, BLOCK_R)
    b = load_b(b_ptr, o, r, O, rank)
    y_at = y_ptr + (start + t)[None, :] * y_stride + o[:, None]
    y_mask = (t < rows)[None, :] & (o < O)[:, None]
    y = tl.load(y_at, mask=y_mask, other=0.0)
    if WAIT:
        seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
        while seen < expected:
            seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
    split = tl.arange(0, SPLITS_POW2)
    h_at = h_ptr + ((split[:, None] * SITES + site) * T + start + t[None, :])[:, :, None] * R
    h_mask = (split < SPLITS)[:, None, None] & (t < rows)[None, :, None]
    h = _h(h_at, r, rank, h_mask).to(b.dtype)
    acc = tl.zeros([BLOCK_O, BLOCK_T], dtype=tl.float32)
    acc = tl.dot(b, tl.trans(h), acc, input_precision="ieee")
    if not SINGLE:
        for first in range(BLOCK_R, rank, BLOCK_R):
            h = _h(h_at, first + r, rank, h_mask).to(b.dtype)
            acc = tl.dot(load_b(b_ptr, o, first + r, O, rank), tl.trans(h), acc, input_precision="ieee")
    tl.store(y_at, (y.to(tl.float32) + acc * scaling).to(y.dtype), mask=y_mask)


@triton.jit(do_not_specialize_on_alignment=["ranks_ptr"])
def shrink(
    x_ptr, h_ptr, items_ptr, addresses_ptr, ranks_ptr, D, x_stride, row, T, R,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Grid (items, splits, sites)."""
    item_ptr = items_ptr + tl.program_id(0) * 4
    split = tl.program_id(1)
    site = tl.program_id(2)
    start = tl.load(item_ptr)
    rows = tl.load(item_ptr + 1)
    entry = tl.load(item_ptr + 2) * row + site
    first = tl.load(item_ptr + 3) * BLOCK_R
    rank = tl.load(ranks_ptr + entry)
    a_ptr = weights(addresses_ptr, entry, 0, x_ptr)
    if (rows > 0) & (first < rank):
        part = split * tl.num_programs(2) + site
        _shrink_unit(
            x_ptr, h_ptr, a_ptr, start, rows, first, rank, part, split, D, x_stride, T, R,
            BLOCK_T, BLOCK_R, BLOCK_K, STEPS,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["ranks_ptr", "scalings_ptr"])
def expand(
    y0_ptr, y1_ptr, y2_ptr, h_ptr, tiles_ptr, addresses_ptr, ranks_ptr, scalings_ptr,
    O0, O1, O2, y0_stride, y1_stride, y2_stride, row, T, R,
    SITES: tl.constexpr, SPLITS: tl.constexpr, SPLITS_POW2: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Grid (output blocks of all sites, tiles)."""
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    site, block, y_ptr, O, y_stride = output(
        tl.program_id(0), y0_ptr, y1_ptr, y2_ptr, O0, O1, O2, y0_stride, y1_stride, y2_stride, SITES, ALIGNED, BLOCK_O
    )
    start = tl.load(tile_ptr)
    rows = tl.load(tile_ptr + 1)
    entry = tl.load(tile_ptr + 2) * row + site
    rank = tl.load(ranks_ptr + entry)
    if (rows > 0) & (rank > 0):
        scaling = tl.load(scalings_ptr + entry)
        b_ptr = weights(addresses_ptr, entry, 1, y0_ptr)
        _expand_unit(
            y_ptr, h_ptr, b_ptr, tiles_ptr, 0, start, rows, rank, scaling, site, block, O, y_stride, T, R,
            SITES, SPLITS, SPLITS_POW2, BLOCK_T, BLOCK_R, BLOCK_O, SINGLE, False,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["ranks_ptr", "scalings_ptr"])
def fused(
    x_ptr, y0_ptr, y1_ptr, y2_ptr, h_ptr, counters_ptr, items_ptr, tiles_ptr, addresses_ptr, ranks_ptr, scalings_ptr,
    D, x_stride, O0, O1, O2, y0_stride, y1_stride, y2_stride, row, T, R, items, tiles, blocks,
    SITES: tl.constexpr, SPLITS: tl.constexpr, SPLITS_POW2: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_O: tl.constexpr, SINGLE: tl.constexpr, FETCH: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (programs), no more than can run at one time; `blocks`: output blocks of all sites."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    lane = tl.arange(0, 32 * WARPS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if FETCH:
        for unit in range(pid, tiles * blocks, programs):
            tile_ptr = tiles_ptr + unit // blocks * 4
            site, block, _, O, _ = output(
                unit % blocks, y0_ptr, y1_ptr, y2_ptr, O0, O1, O2, y0_stride, y1_stride, y2_stride,
                SITES, ALIGNED, BLOCK_O,
            )  # fmt: skip
            rows = tl.load(tile_ptr + 1)
            entry = tl.load(tile_ptr + 2) * row + site
            stride = (tl.load(ranks_ptr + entry) + 7) // 8 * 8
            b_ptr = weights(addresses_ptr, entry, 1, y0_ptr)
            begin = block * BLOCK_O
            size = (tl.minimum(begin + BLOCK_O, O) - begin) * stride * 2 + lane * 0
            wanted = (lane == 0) & (rows * stride > 0)
            ask_for(b_ptr + begin * stride + lane * 0, size, wanted.to(tl.int32))
    if PDL:
        tl.extra.cuda.gdc_wait()
    for unit in range(pid, items * SPLITS * SITES, programs):
        site = unit % SITES
        split = unit // SITES % SPLITS
        item_ptr = items_ptr + unit // (SITES * SPLITS) * 4
        start = tl.load(item_ptr)
        rows = tl.load(item_ptr + 1)
        entry = tl.load(item_ptr + 2) * row + site
        first = tl.load(item_ptr + 3) * BLOCK_R
        rank = tl.load(ranks_ptr + entry)
        a_ptr = weights(addresses_ptr, entry, 0, x_ptr)
        if (rows > 0) & (first < rank):
            _shrink_unit(
                x_ptr, h_ptr, a_ptr, start, rows, first, rank, split * SITES + site, split, D, x_stride, T, R,
                BLOCK_T, BLOCK_R, BLOCK_K, STEPS,
            )  # fmt: skip
        if rows > 0:
            tl.debug_barrier()  # all threads have written before one says so
            tl.atomic_add(counters_ptr + start, 1, sem="release")
    for unit in range(pid, tiles * blocks, programs):
        tile_ptr = tiles_ptr + unit // blocks * 4
        site, block, y_ptr, O, y_stride = output(
            unit % blocks, y0_ptr, y1_ptr, y2_ptr, O0, O1, O2, y0_stride, y1_stride, y2_stride, SITES, ALIGNED, BLOCK_O
        )
        start = tl.load(tile_ptr)
        rows = tl.load(tile_ptr + 1)
        entry = tl.load(tile_ptr + 2) * row + site
        expected = tl.load(tile_ptr + 3) * SITES * SPLITS
        rank = tl.load(ranks_ptr + entry)
        scaling = tl.load(scalings_ptr + entry)
        b_ptr = weights(addresses_ptr, entry, 1, y0_ptr)
        counter_ptr = counters_ptr + start
        if (rows > 0) & (rank > 0):
            _expand_unit(
                y_ptr, h_ptr, b_ptr, counter_ptr, expected, start, rows, rank, scaling, site, block, O, y_stride, T, R,
                SITES, SPLITS, SPLITS_POW2, BLOCK_T, BLOCK_R, BLOCK_O, SINGLE, True,
            )  # fmt: skip
        if rows > 0:
            tl.debug_barrier()  # all threads have read before the last unit clears the counter
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == expected + blocks - 1:
                tl.atomic_xchg(counter_ptr, 0, sem="relaxed")
