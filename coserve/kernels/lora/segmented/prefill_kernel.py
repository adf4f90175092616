"""Segmented LoRA for prefill and training, forward: tiles of many rows of one adapter. The time goes into x and y.

    shrink  h[site, t, r] = Σ_k x[t, k] A_site[r, k]                          x is read once for all sites
    expand  out_site[t, o] = y_site[t, o] + scaling Σ_r h[site, t, r] B_site[o, r]

With few tiles and many inputs, k is split among programs, and each writes a partial sum in fp32. If the expand reads h
few times, it adds up the partial sums. Otherwise the last program to finish a tile does so (found by a counter, which
it resets to zero). The order of the sum is always the same. Fully sharded pairs: as in `decode_kernel`; h then has a
shard per GPU.

Expand is bound by how many bytes of y are in flight. A program walks along several output blocks of its tile, and the
next blocks' y and B are copied to shared memory meanwhile (`tl.range` with its own `num_stages` pipelines all loads of
the loop). Ranks up to 16, 32, 64 and 128 have a loop of each width. For a block-diagonal matrix only the blocks are
stored and read: ranks of A that read the same inputs are computed together, and so are outputs of B that read the same
ranks (`BLOCKED`).

x: (T, D); y, out: (T, O); h: (G, T, R); parts: (splits, G, T, R) fp32; tiles: (N, 4) int32; counters: (T) int32, zeros;
addresses: (slots, G, 2) int64; ranks: (slots, G) int32, `TableEntry.shape`; scalings: (slots, G) fp32; `row` is the
distance in entries from one slot to the next. A slot of -1 has rank 0: its rows are copied.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.lora.segmented.loads import (
    a_block,
    a_blocks,
    b_block,
    b_blocks,
    b_rows,
    h_columns,
    h_ranks,
    load_b,
    load_b_rows,
    output,
    padded,
    rank_of,
    shape_at,
    waits,
    weights,
)


@triton.jit
def _sum_parts(parts_ptr, at, mask, split_stride, splits):
    total = tl.load(parts_ptr + at, mask=mask, other=0.0)
    for split in range(1, splits):
        total += tl.load(parts_ptr + split * split_stride + at, mask=mask, other=0.0)
    return total


@triton.jit
def finish(
    parts_ptr,
    h_ptr,
    counters_ptr,
    start,
    rows,
    rank,
    site_stride,
    split_stride,
    R,
    SITES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Counts a program that has written its part of a tile; the last one sums the parts into h."""
    splits = tl.num_programs(1)
    expected = splits * tl.cdiv(rank, BLOCK_R)
    counter_ptr = counters_ptr + start
    tl.debug_barrier()  # all threads have written before one counts the program
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == expected - 1:
        t = start + tl.arange(0, BLOCK_T)
        dtype = h_ptr.dtype.element_ty
        for first in range(0, rank, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            at = t[:, None] * R + r[None, :]
            mask = (t < start + rows)[:, None] & (r < padded(rank))[None, :]
            total0 = _sum_parts(parts_ptr, at, mask, split_stride, splits)
            total1 = total0
            total2 = total0
            if SITES > 1:  # all loads before the first store: they share one latency
                total1 = _sum_parts(parts_ptr + site_stride, at, mask, split_stride, splits)
            if SITES > 2:
                total2 = _sum_parts(parts_ptr + 2 * site_stride, at, mask, split_stride, splits)
            tl.store(h_ptr + at, total0.to(dtype), mask=mask)
            if SITES > 1:
                tl.store(h_ptr + site_stride + at, total1.to(dtype), mask=mask)
            if SITES > 2:
                tl.store(h_ptr + 2 * site_stride + at, total2.to(dtype), mask=mask)
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed")


@triton.jit(do_not_specialize=["row", "T", "steps"], do_not_specialize_on_alignment=["ranks_ptr"])
def shrink(
    x_ptr,
    h_ptr,
    parts_ptr,
    counters_ptr,
    tiles_ptr,
    addresses_ptr,
    ranks_ptr,
    D,
    x_stride,
    row,
    T,
    R,
    steps,
    SITES: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKED: tl.constexpr,
    SHARDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles, splits, rank blocks). With `SPLIT`, the last program of a tile sums the parts into h; otherwise only
    `parts_ptr` is written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile_ptr = tiles_ptr + tl.program_id(0) * 4
    split = tl.program_id(1)
    first = tl.program_id(2) * BLOCK_R
    start = tl.load(tile_ptr)
    rows = tl.load(tile_ptr + 1)
    slot = tl.load(tile_ptr + 2)
    shape0 = shape_at(ranks_ptr, slot, row, 0)
    shape1 = shape_at(ranks_ptr, slot, row, 1) if SITES > 1 else 0
    shape2 = shape_at(ranks_ptr, slot, row, 2) if SITES > 2 else 0
    rank0 = rank_of(shape0) // SHARDS
    rank1 = rank_of(shape1) // SHARDS if SITES > 1 else 0
    rank2 = rank_of(shape2) // SHARDS if SITES > 2 else 0
    most = tl.maximum(rank0, tl.maximum(rank1, rank2))
    if PDL and waits(first >= most):
        tl.extra.cuda.gdc_wait()
    if first >= most:
        return
    sizes = (D, x_stride, row, T, R, steps)
    ptrs = (x_ptr, h_ptr, parts_ptr, counters_ptr, addresses_ptr)
    ranks = (rank0, rank1, rank2, most)
    tile = (start, rows, slot, split, first)
    if BLOCKED and a_blocks(shape0 | shape1 | shape2) > 1:
        _shrink_blocks(ptrs, sizes, ranks_ptr, most, tile, SITES, SPLIT, BLOCK_T, BLOCK_R, BLOCK_K)
        return
    if BLOCK_R > 16 and most <= 16:  # a small rank does not pay for wider blocks
        _shrink_tile(ptrs, sizes, ranks, tile, SITES, SPLIT, BLOCK_T, 16, BLOCK_K)
    elif BLOCK_R > 32 and most <= 32:
        _shrink_tile(ptrs, sizes, ranks, tile, SITES, SPLIT, BLOCK_T, 32, BLOCK_K)
    elif BLOCK_R > 64 and most <= 64:
        _shrink_tile(ptrs, sizes, ranks, tile, SITES, SPLIT, BLOCK_T, 64, BLOCK_K)
    else:
        _shrink_tile(ptrs, sizes, ranks, tile, SITES, SPLIT, BLOCK_T, BLOCK_R, BLOCK_K)


@triton.jit
def _shrink_tile(
    ptrs,
    sizes,
    ranks,
    tile,
    SITES: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    x_ptr, h_ptr, parts_ptr, counters_ptr, addresses_ptr = ptrs
    D, x_stride, row, T, R, steps = sizes
    rank0, rank1, rank2, most = ranks
    start, rows, slot, split, first = tile
    t = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    r = first + tl.arange(0, BLOCK_R)
    a0_at = weights(addresses_ptr, slot * row, 0, x_ptr) + r[:, None] * D + k[None, :]
    a1_at = a0_at
    a2_at = a0_at
    if SITES > 1:
        a1_at = weights(addresses_ptr, slot * row + 1, 0, x_ptr) + r[:, None] * D + k[None, :]
    if SITES > 2:
        a2_at = weights(addresses_ptr, slot * row + 2, 0, x_ptr) + r[:, None] * D + k[None, :]
    x_at = x_ptr + (start + t)[:, None].to(tl.int64) * x_stride + k[None, :]
    acc0 = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
    acc1 = acc0
    acc2 = acc0
    for at in range(split * steps * BLOCK_K, tl.minimum((split + 1) * steps * BLOCK_K, D), BLOCK_K):
        inside = (k < D - at)[None, :]
        x = tl.load(x_at + at, mask=(t < rows)[:, None] & inside, other=0.0)
        a0 = tl.load(a0_at + at, mask=(r < rank0)[:, None] & inside, other=0.0)
        acc0 = tl.dot(x, tl.trans(a0), acc0, input_precision="ieee")
        if SITES > 1:
            a1 = tl.load(a1_at + at, mask=(r < rank1)[:, None] & inside, other=0.0)
            acc1 = tl.dot(x, tl.trans(a1), acc1, input_precision="ieee")
        if SITES > 2:
            a2 = tl.load(a2_at + at, mask=(r < rank2)[:, None] & inside, other=0.0)
            acc2 = tl.dot(x, tl.trans(a2), acc2, input_precision="ieee")
    h_at = parts_ptr + (split * SITES * T + start + t)[:, None] * R + r[None, :]
    keep = (t < rows)[:, None]
    out_type = parts_ptr.dtype.element_ty
    tl.store(h_at, acc0.to(out_type), mask=keep & (r < padded(rank0))[None, :])
    if SITES > 1:
        tl.store(h_at + T * R, acc1.to(out_type), mask=keep & (r < padded(rank1))[None, :])
    if SITES > 2:
        tl.store(h_at + 2 * T * R, acc2.to(out_type), mask=keep & (r < padded(rank2))[None, :])
    if SPLIT:
        finish(parts_ptr, h_ptr, counters_ptr, start, rows, most, T * R, SITES * T * R, R, SITES, BLOCK_T, BLOCK_R)


@triton.jit
def _shrink_blocks(
    ptrs,
    sizes,
    ranks_ptr,
    most,
    tile,
    SITES: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`_shrink_tile` for tiles where a site's A is block-diagonal: loops over the sites, and over their ranks about a
    diagonal block at a time."""
    _, h_ptr, parts_ptr, counters_ptr, _ = ptrs
    _, _, row, T, R, _ = sizes
    start, rows, slot, _, first = tile
    WIDE: tl.constexpr = min(BLOCK_R, 64)
    for site in range(SITES):
        shape = shape_at(ranks_ptr, slot, row, site)
        end = tl.minimum(first + BLOCK_R, rank_of(shape))
        if WIDE > 16 and rank_of(shape) // a_blocks(shape) > 16:
            for at in range(first, end, WIDE):
                _shrink_ranks(ptrs, sizes, tile, site, shape, at, SITES, BLOCK_T, WIDE, BLOCK_K)
        else:
            for at in range(first, end, 16):
                _shrink_ranks(ptrs, sizes, tile, site, shape, at, SITES, BLOCK_T, 16, BLOCK_K)
    if SPLIT:
        finish(parts_ptr, h_ptr, counters_ptr, start, rows, most, T * R, SITES * T * R, R, SITES, BLOCK_T, BLOCK_R)


@triton.jit
def _shrink_ranks(
    ptrs,
    sizes,
    tile,
    site,
    shape,
    first,
    SITES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute h for one site's ranks [first, first + BLOCK_R), over those inputs of the program's split that the ranks'
    blocks cover."""
    x_ptr, _, parts_ptr, _, addresses_ptr = ptrs
    D, x_stride, row, T, R, steps = sizes
    start, rows, slot, split, _ = tile
    rank = rank_of(shape)
    ranks = tl.maximum(rank // a_blocks(shape), 1)
    t = tl.arange(0, BLOCK_T)
    r = first + tl.arange(0, BLOCK_R)
    a_ptr = weights(addresses_ptr, slot * row + site, 0, x_ptr)
    x_at = x_ptr + (start + t)[:, None].to(tl.int64) * x_stride
    keep = (t < rows)[:, None]
    begin = split * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, D)
    acc = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
    for block in range(first // ranks, (tl.minimum(first + BLOCK_R, rank) - 1) // ranks + 1):
        low, length, first_rank, end_rank = a_block(shape, block, D)
        a_at = a_ptr - low + r[:, None] * length
        real = ((r >= first_rank) & (r < end_rank))[:, None]
        first_k = begin + tl.maximum(low - begin, 0) // BLOCK_K * BLOCK_K
        for at in range(first_k, tl.minimum(end, low + length), BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)
            inside = ((k >= low) & (k < low + length) & (k < D))[None, :]
            x = tl.load(x_at + k[None, :], mask=keep & inside, other=0.0)
            a = tl.load(a_at + k[None, :], mask=real & inside, other=0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
    h_at = parts_ptr + ((split * SITES + site) * T + start + t)[:, None] * R + r[None, :]
    tl.store(h_at, acc.to(parts_ptr.dtype.element_ty), mask=keep & (r < padded(rank))[None, :])


@triton.jit(do_not_specialize=["row", "T"], do_not_specialize_on_alignment=["ranks_ptr", "scalings_ptr"])
def expand(
    y0_ptr,
    y1_ptr,
    y2_ptr,
    out0_ptr,
    out1_ptr,
    out2_ptr,
    h_ptr,
    kept_ptr,
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
    out0_stride,
    out1_stride,
    out2_stride,
    row,
    T,
    R,
    SITES: tl.constexpr,
    ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCKED: tl.constexpr,
    SHARDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (runs of `BLOCKS` output blocks of all sites, tiles). `out` may be `y`.

    With several blocks per program, no rank may exceed `BLOCK_R`, `h_ptr` may hold `PARTS` partial sums, and `KEEP`
    writes their sum to `kept_ptr`. With one block, the program loops over the ranks, `BLOCK_R` at a time.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    RUN: tl.constexpr = BLOCK_O * BLOCKS
    outs, out_strides = (out0_ptr, out1_ptr, out2_ptr), (out0_stride, out1_stride, out2_stride)
    ys, y_strides = (y0_ptr, y1_ptr, y2_ptr), (y0_stride, y1_stride, y2_stride)
    Os = (O0, O1, O2)
    _, _, out_ptr, _, out_stride = output(tl.program_id(0), outs, Os, out_strides, SITES, ALIGNED, RUN)
    site, run, y_ptr, O, y_stride = output(tl.program_id(0), ys, Os, y_strides, SITES, ALIGNED, RUN)
    start = tl.load(tile_ptr)
    rows = tl.load(tile_ptr + 1)
    slot = tl.load(tile_ptr + 2)
    shape = shape_at(ranks_ptr, slot, row, site)
    rank = rank_of(shape)
    scaling = tl.load(scalings_ptr + slot * row + site, mask=slot >= 0, other=0.0)
    b_ptr = weights(addresses_ptr, tl.maximum(slot, 0) * row + site, 1, y0_ptr)
    if PDL and waits(rows == 0):
        tl.extra.cuda.gdc_wait()
    if rows == 0:
        return
    line = start.to(tl.int64)
    h_at = (site * T + start) * R
    ptrs = (y_ptr + line * y_stride, out_ptr + line * out_stride, h_ptr + h_at, kept_ptr + h_at, b_ptr)
    begin = run * RUN
    sizes = (y_stride, out_stride, SITES * T * R, R, O, rows, rank, scaling)
    if BLOCKS == 1:
        _expand_block(ptrs, sizes, begin, shape, BLOCKED, PARTS, SHARDS, BLOCK_T, BLOCK_R, BLOCK_O, STAGES)
    elif BLOCKED:
        _expand_blocks(ptrs, sizes, begin, shape, PARTS, KEEP, BLOCK_T, BLOCK_R, BLOCK_O, RUN, STAGES)
    else:
        ranks = h_ranks(rank, SHARDS)
        _expand_run(ptrs, sizes, begin, begin + RUN, ranks, PARTS, SHARDS, KEEP, BLOCK_T, BLOCK_R, BLOCK_O, STAGES)


@triton.jit
def _expand_blocks(
    ptrs,
    sizes,
    begin,
    shape,
    PARTS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute a run of output blocks. If it lies in one diagonal block of B (always, if B is dense), it reads only that
    block's ranks."""
    y_ptr, out_ptr, h_ptr, kept_ptr, b_ptr = ptrs
    y_stride, out_stride, split_stride, R, O, rows, rank, scaling = sizes
    each = O // b_blocks(shape)
    end = tl.minimum(begin + RUN, O)
    if KEEP and begin == 0:
        t = tl.arange(0, BLOCK_T)
        r = tl.arange(0, BLOCK_R)
        h_at = t[:, None] * R + r[None, :]
        h_mask = (t < rows)[:, None] & (r < padded(rank))[None, :]
        h = _sum_h(h_ptr + h_at, h_mask, split_stride, PARTS)
        tl.store(kept_ptr + h_at, h.to(kept_ptr.dtype.element_ty), mask=h_mask)
    if begin // each == (end - 1) // each:
        low, length = b_block(shape, begin // each)
        own = (y_ptr, out_ptr, h_ptr + low, kept_ptr, b_ptr)
        block = (y_stride, out_stride, split_stride, R, O, rows, length, scaling)
        _expand_run(own, block, begin, end, padded(rank) - low, PARTS, 1, False, BLOCK_T, BLOCK_R, BLOCK_O, STAGES)
    else:
        for at in range(begin, end, BLOCK_O):
            _expand_block(ptrs, sizes, at, shape, True, PARTS, 1, BLOCK_T, 16, BLOCK_O, 1)


@triton.jit
def _sum_h(h_at, mask, split_stride, PARTS: tl.constexpr):
    h = tl.load(h_at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        h += tl.load(h_at + part * split_stride, mask=mask, other=0.0)
    return h


@triton.jit
def _expand_run(
    ptrs,
    sizes,
    begin,
    end,
    ranks,
    PARTS: tl.constexpr,
    SHARDS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the output blocks from `begin` to `end`, by a loop as wide as the adapter's rank needs. `ranks`: the
    ranks that h has."""
    _, _, _, _, _, _, rank, _ = sizes
    if BLOCK_R > 16 and rank <= 16:
        _expand_loop(ptrs, sizes, begin, end, ranks, PARTS, SHARDS, KEEP, BLOCK_T, 16, BLOCK_O, STAGES)
    elif BLOCK_R > 32 and rank <= 32:
        _expand_loop(ptrs, sizes, begin, end, ranks, PARTS, SHARDS, KEEP, BLOCK_T, 32, BLOCK_O, STAGES)
    elif BLOCK_R > 64 and rank <= 64:
        _expand_loop(ptrs, sizes, begin, end, ranks, PARTS, SHARDS, KEEP, BLOCK_T, 64, BLOCK_O, STAGES)
    else:
        _expand_loop(ptrs, sizes, begin, end, ranks, PARTS, SHARDS, KEEP, BLOCK_T, BLOCK_R, BLOCK_O, STAGES)


@triton.jit
def _expand_loop(
    ptrs,
    sizes,
    begin,
    end,
    ranks,
    PARTS: tl.constexpr,
    SHARDS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Loop over output blocks: h stays in registers, y and B are streamed."""
    y_ptr, out_ptr, h_ptr, kept_ptr, b_ptr = ptrs
    y_stride, out_stride, split_stride, R, O, rows, rank, scaling = sizes
    t = tl.arange(0, BLOCK_T)
    r = tl.arange(0, BLOCK_R)
    keep = (t < rows)[:, None]
    h_at = t[:, None] * R + h_columns(r, rank, split_stride, SHARDS)[None, :]
    h_mask = keep & (r < ranks)[None, :]
    h = _sum_h(h_ptr + h_at, h_mask, split_stride, PARTS)
    h = h.to(y_ptr.dtype.element_ty)
    if KEEP and begin == 0:
        tl.store(kept_ptr + h_at, h, mask=h_mask)
    for at in tl.range(begin, tl.minimum(end, O), BLOCK_O, num_stages=STAGES):
        o = at + tl.arange(0, BLOCK_O)
        mask = keep & (o < O)[None, :]
        y = tl.load(y_ptr + t[:, None] * y_stride + o[None, :], mask=mask, other=0.0)
        acc = tl.dot(h, tl.trans(load_b(b_ptr, o, r, O, rank)), input_precision="ieee")
        out_at = out_ptr + t[:, None] * out_stride + o[None, :]
        tl.store(out_at, (y.to(tl.float32) + acc * scaling).to(y.dtype), mask=mask)


@triton.jit
def _expand_block(
    ptrs,
    sizes,
    begin,
    shape,
    BLOCKED: tl.constexpr,
    PARTS: tl.constexpr,
    SHARDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute one output block for any rank; h and B are streamed. `BLOCKED`: add up all diagonal blocks of B that
    overlap it."""
    y_ptr, out_ptr, h_ptr, _, b_ptr = ptrs
    y_stride, out_stride, split_stride, R, O, rows, rank, scaling = sizes
    t = tl.arange(0, BLOCK_T)
    o = begin + tl.arange(0, BLOCK_O)
    keep = (t < rows)[:, None]
    mask = keep & (o < O)[None, :]
    y = tl.load(y_ptr + t[:, None] * y_stride + o[None, :], mask=mask, other=0.0)
    length = (rank + 7) // 8 * 8
    own = tl.zeros([BLOCK_O], dtype=tl.int32)
    low = 0
    high = rank
    if BLOCKED:
        if b_blocks(shape) > 1:
            length, own, low, high = b_rows(shape, o, begin, BLOCK_O, O)
        # repeats a hint that a branch hides from the compiler
        length, own, low = length // 8 * 8, own // 8 * 8, low // 8 * 8
    acc = tl.zeros([BLOCK_T, BLOCK_O], dtype=tl.float32)
    for first in tl.range(low, high, BLOCK_R, num_stages=STAGES):
        r = first + tl.arange(0, BLOCK_R)
        h_mask = keep & (r < h_ranks(rank, SHARDS))[None, :]
        h_at = h_ptr + t[:, None] * R + h_columns(r, rank, split_stride, SHARDS)[None, :]
        h = _sum_h(h_at, h_mask, split_stride, PARTS).to(y.dtype)
        acc = tl.dot(h, tl.trans(load_b_rows(b_ptr, o, r, O, own, length, BLOCKED)), acc, input_precision="ieee")
    out_at = out_ptr + t[:, None] * out_stride + o[None, :]
    tl.store(out_at, (y.to(tl.float32) + acc * scaling).to(y.dtype), mask=mask)
