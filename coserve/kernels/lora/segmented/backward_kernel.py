"""Segmented LoRA, backward. With dy the gradient of a site's output and g = scaling dy B:

    shrink_b  g[site, t, r] = scaling Σ_o dy[t, o] B_site[o, r]
    expand_a  dx[t, d] = Σ_site Σ_r g[site, t, r] A_site[r, d]                 sums over the sites that read x
    outer     dA_site[r, d] = Σ_t g[site, t, r] x[t, d]                        x is read once for all sites
              dB_site[o, r] = scaling Σ_t dy[t, o] h[site, t, r]

Sums are kept in fp32. If an adapter's tokens are divided among programs, each writes its own fp32 partial sum, so that
the result does not depend on their order. Gradients are packed like the matrices: only the blocks of a block-diagonal
one exist. Shapes are those of `prefill_kernel`; spans: (A, 4) int32; starts: (slots, G, 2) int32, the offsets of a
slot's dA, in entries per column of x, and of its dB, in entries per output.
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
    load_b,
    padded,
    rank_of,
    shape_at,
    weights,
)
from coserve.kernels.lora.segmented.prefill_kernel import finish


@triton.jit(do_not_specialize=["row", "steps"], do_not_specialize_on_alignment=["ranks_ptr", "scalings_ptr"])
def shrink_b(
    dy_ptr,
    g_ptr,
    parts_ptr,
    counters_ptr,
    tiles_ptr,
    addresses_ptr,
    ranks_ptr,
    scalings_ptr,
    O,
    dy_stride,
    row,
    split_stride,
    R,
    steps,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile_ptr = tiles_ptr + tl.program_id(0) * 4
    split = tl.program_id(1)
    first = tl.program_id(2) * BLOCK_R
    start = tl.load(tile_ptr)
    rows = tl.load(tile_ptr + 1)
    slot = tl.load(tile_ptr + 2)
    shape = shape_at(ranks_ptr, slot, row, 0)
    rank = rank_of(shape)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if first >= rank:
        return
    b_ptr = weights(addresses_ptr, slot * row, 1, dy_ptr)
    if BLOCKED and b_blocks(shape) > 1:
        scaling = tl.load(scalings_ptr + slot * row)
        ptrs = (dy_ptr, parts_ptr + split * split_stride, b_ptr)
        sizes = (O, dy_stride, R, split * steps * BLOCK_K, steps, start, rows, shape, scaling)
        end_rank = tl.minimum(first + BLOCK_R, rank)
        if BLOCK_R > 16 and rank // b_blocks(shape) > 16:
            _shrink_b_ranks(ptrs, sizes, first, BLOCK_T, BLOCK_R, BLOCK_K)
        else:
            for some in range(first, end_rank, 16):
                _shrink_b_ranks(ptrs, sizes, some, BLOCK_T, 16, BLOCK_K)
        if SPLIT:
            finish(parts_ptr, g_ptr, counters_ptr, start, rows, rank, 0, split_stride, R, 1, BLOCK_T, BLOCK_R)
        return
    t = tl.arange(0, BLOCK_T)
    r = first + tl.arange(0, BLOCK_R)
    keep = (t < rows)[:, None]
    dy_at = dy_ptr + (start + t)[:, None].to(tl.int64) * dy_stride
    begin = split * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, O)
    acc = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
    for at in range(begin, end, BLOCK_K):
        o = at + tl.arange(0, BLOCK_K)
        dy = tl.load(dy_at + o[None, :], mask=keep & (o < O)[None, :], other=0.0)
        acc = tl.dot(dy, load_b(b_ptr, o, r, O, rank), acc, input_precision="ieee")
    acc *= tl.load(scalings_ptr + slot * row)
    g_at = parts_ptr + split * split_stride + (start + t)[:, None] * R + r[None, :]
    tl.store(g_at, acc.to(parts_ptr.dtype.element_ty), mask=keep & (r < padded(rank))[None, :])
    if SPLIT:
        finish(parts_ptr, g_ptr, counters_ptr, start, rows, rank, 0, split_stride, R, 1, BLOCK_T, BLOCK_R)


@triton.jit
def _shrink_b_ranks(ptrs, sizes, first, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """Compute g for the ranks [first, first + BLOCK_R) of a block-diagonal B, reading only those of the program's
    outputs that these ranks' blocks cover."""
    dy_ptr, parts_ptr, b_ptr = ptrs
    O, dy_stride, R, begin, steps, start, rows, shape, scaling = sizes
    rank = rank_of(shape)
    ranks = rank // b_blocks(shape)
    t = tl.arange(0, BLOCK_T)
    r = first + tl.arange(0, BLOCK_R)
    keep = (t < rows)[:, None]
    dy_at = dy_ptr + (start + t)[:, None].to(tl.int64) * dy_stride
    end = begin + steps * BLOCK_K
    acc = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
    for block in range(first // ranks, (tl.minimum(first + BLOCK_R, rank) - 1) // ranks + 1):
        low, length = b_block(shape, block)
        first_row = block * (O // b_blocks(shape))
        end_row = first_row + O // b_blocks(shape)
        first_o = begin + tl.maximum(first_row - begin, 0) // BLOCK_K * BLOCK_K
        for at in range(first_o, tl.minimum(end, end_row), BLOCK_K):
            o = at + tl.arange(0, BLOCK_K)
            dy = tl.load(dy_at + o[None, :], mask=keep & (o < O)[None, :], other=0.0)
            real = (
                (o >= first_row)[:, None] & (o < end_row)[:, None] & (r >= low)[None, :] & (r < low + length)[None, :]
            )
            b = tl.load(b_ptr - low + o[:, None] * length + r[None, :], mask=real, other=0.0)
            acc = tl.dot(dy, b, acc, input_precision="ieee")
    g_at = parts_ptr + (start + t)[:, None] * R + r[None, :]
    tl.store(g_at, (acc * scaling).to(parts_ptr.dtype.element_ty), mask=keep & (r < padded(rank))[None, :])


@triton.jit(do_not_specialize=["row", "T"], do_not_specialize_on_alignment=["ranks_ptr"])
def expand_a(
    dx_ptr,
    g_ptr,
    tiles_ptr,
    addresses_ptr,
    ranks_ptr,
    D,
    dx_stride,
    row,
    T,
    R,
    SITES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    start = tl.load(tile_ptr)
    rows = tl.load(tile_ptr + 1)
    slot = tl.load(tile_ptr + 2)
    shape0 = shape_at(ranks_ptr, slot, row, 0)
    shape1 = shape_at(ranks_ptr, slot, row, 1) if SITES > 1 else 0
    shape2 = shape_at(ranks_ptr, slot, row, 2) if SITES > 2 else 0
    if PDL:
        tl.extra.cuda.gdc_wait()
    t = tl.arange(0, BLOCK_T)
    first_d = tl.program_id(0) * BLOCK_D
    d = first_d + tl.arange(0, BLOCK_D)
    keep = (t < rows)[:, None]
    acc = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for site in tl.static_range(SITES):
        shape = shape0 if site == 0 else (shape1 if site == 1 else shape2)
        rank = rank_of(shape)
        a_ptr = weights(addresses_ptr, tl.maximum(slot, 0) * row + site, 0, dx_ptr)
        g_at = g_ptr + (site * T + start + t)[:, None] * R
        if BLOCKED:
            width = D // a_blocks(shape)
            for block in range(first_d // width, (tl.minimum(first_d + BLOCK_D, D) - 1) // width + 1):
                low, length, first_rank, end_rank = a_block(shape, block, D)
                inside = ((d >= low) & (d < low + length) & (d < D))[None, :]
                for first in range(first_rank // 16 * 16, end_rank, BLOCK_R):
                    r = first + tl.arange(0, BLOCK_R)
                    g = tl.load(g_at + r[None, :], mask=keep & (r < padded(rank))[None, :], other=0.0)
                    real = ((r >= first_rank) & (r < end_rank))[:, None]
                    a = tl.load(a_ptr - low + r[:, None] * length + d[None, :], mask=real & inside, other=0.0)
                    acc = tl.dot(g, a, acc, input_precision="ieee")
        else:
            for first in range(0, rank, BLOCK_R):
                r = first + tl.arange(0, BLOCK_R)
                g = tl.load(g_at + r[None, :], mask=keep & (r < padded(rank))[None, :], other=0.0)
                a = tl.load(a_ptr + r[:, None] * D + d[None, :], mask=(r < rank)[:, None] & (d < D)[None, :], other=0.0)
                acc = tl.dot(g, a, acc, input_precision="ieee")
    dx_at = dx_ptr + (start + t)[:, None].to(tl.int64) * dx_stride + d[None, :]
    tl.store(dx_at, acc.to(dx_ptr.dtype.element_ty), mask=keep & (d < D)[None, :])


@triton.jit(
    do_not_specialize=["row", "T", "parts"], do_not_specialize_on_alignment=["ranks_ptr", "scalings_ptr", "starts_ptr"]
)
def outer(
    u_ptr,
    v_ptr,
    out0_ptr,
    out1_ptr,
    out2_ptr,
    tiles_ptr,
    spans_ptr,
    ranks_ptr,
    scalings_ptr,
    starts_ptr,
    sums_ptr,
    N,
    u_stride,
    row,
    T,
    R,
    parts,
    part0_stride,
    part1_stride,
    part2_stride,
    SITES: tl.constexpr,
    OF_B: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCKED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    span_ptr = spans_ptr + tl.program_id(1) * 4
    part = tl.program_id(2) % parts
    first = tl.program_id(2) // parts * BLOCK_R
    first_tile = tl.load(span_ptr)
    tiles = tl.load(span_ptr + 1)
    entry = tl.load(span_ptr + 2) * row
    shape0 = tl.load(ranks_ptr + entry)
    shape1 = tl.load(ranks_ptr + entry + 1) if SITES > 1 else 0
    shape2 = tl.load(ranks_ptr + entry + 2) if SITES > 2 else 0
    rank0 = rank_of(shape0)
    rank1 = rank_of(shape1) if SITES > 1 else 0
    rank2 = rank_of(shape2) if SITES > 2 else 0
    idle = first >= tl.maximum(rank0, tl.maximum(rank1, rank2))
    if BLOCKED:
        some = _overlap(shape0, first, N, OF_B, BLOCK_N, BLOCK_R)
        if SITES > 1:
            some = some | _overlap(shape1, first, N, OF_B, BLOCK_N, BLOCK_R)
        if SITES > 2:
            some = some | _overlap(shape2, first, N, OF_B, BLOCK_N, BLOCK_R)
        idle = idle | (not some)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if idle:
        return
    t = tl.arange(0, BLOCK_T)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = first + tl.arange(0, BLOCK_R)
    acc0 = tl.zeros([BLOCK_N, BLOCK_R], dtype=tl.float32)
    acc1 = acc0
    acc2 = acc0
    for tile in range(first_tile + tiles * part // parts, first_tile + tiles * (part + 1) // parts):
        start = tl.load(tiles_ptr + tile * 4)
        keep = (t < tl.load(tiles_ptr + tile * 4 + 1))[:, None]
        u_at = u_ptr + (start + t)[:, None].to(tl.int64) * u_stride + n[None, :]
        u = tl.trans(tl.load(u_at, mask=keep & (n < N)[None, :], other=0.0))
        v_at = v_ptr + (start + t)[:, None] * R + r[None, :]
        v0 = tl.load(v_at, mask=keep & (r < padded(rank0))[None, :], other=0.0)
        acc0 = tl.dot(u, v0, acc0, input_precision="ieee")
        if SITES > 1:
            v1 = tl.load(v_at + T * R, mask=keep & (r < padded(rank1))[None, :], other=0.0)
            acc1 = tl.dot(u, v1, acc1, input_precision="ieee")
        if SITES > 2:
            v2 = tl.load(v_at + 2 * T * R, mask=keep & (r < padded(rank2))[None, :], other=0.0)
            acc2 = tl.dot(u, v2, acc2, input_precision="ieee")
    if OF_B:
        acc0 *= tl.load(scalings_ptr + entry)
    if ADD:
        _add(weights(sums_ptr, entry, 1 if OF_B else 0, scalings_ptr), acc0, n, r, N, shape0, OF_B, BLOCKED)
        if SITES > 1:
            _add(weights(sums_ptr, entry + 1, 1 if OF_B else 0, scalings_ptr), acc1, n, r, N, shape1, OF_B, BLOCKED)
        if SITES > 2:
            _add(weights(sums_ptr, entry + 2, 1 if OF_B else 0, scalings_ptr), acc2, n, r, N, shape2, OF_B, BLOCKED)
    else:
        _store(out0_ptr + part.to(tl.int64) * part0_stride, acc0, starts_ptr, entry, n, r, N, shape0, OF_B, BLOCKED)
        if SITES > 1:
            _store(
                out1_ptr + part.to(tl.int64) * part1_stride, acc1, starts_ptr, entry + 1, n, r, N, shape1, OF_B, BLOCKED
            )
        if SITES > 2:
            _store(
                out2_ptr + part.to(tl.int64) * part2_stride, acc2, starts_ptr, entry + 2, n, r, N, shape2, OF_B, BLOCKED
            )


@triton.jit
def _blocks(shape, OF_B: tl.constexpr):
    return b_blocks(shape) if OF_B else a_blocks(shape)


@triton.jit
def _overlap(shape, first, N, OF_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    """Whether the diagonal blocks of the ranks [first, first + BLOCK_R) cover any of the program's columns."""
    blocks = _blocks(shape, OF_B)
    width, ranks = N // blocks, rank_of(shape) // blocks
    first_n = tl.program_id(0) * BLOCK_N
    begin = first_n // width * ranks
    end = ((tl.minimum(first_n + BLOCK_N, N) - 1) // width + 1) * ranks
    return (begin < first + BLOCK_R) & (end > first)


@triton.jit
def _places(n, r, N, shape, OF_B: tl.constexpr):
    """Return the offsets of entries (n, r) of a packed block-diagonal dA or dB, and a mask of those that exist."""
    blocks = _blocks(shape, OF_B)
    width = N // blocks
    ranks = rank_of(shape) // blocks
    block_of_n, block_of_r = n // width, r // ranks
    mask = (n < N)[:, None] & (r < rank_of(shape))[None, :] & (block_of_n[:, None] == block_of_r[None, :])
    if OF_B:
        at = (n * ranks - block_of_n * ranks)[:, None] + r[None, :]
    else:
        at = (r * width - block_of_r * width)[None, :] + n[:, None]
    return at, mask


@triton.jit
def _store(out_ptr, acc, starts_ptr, entry, n, r, N, shape, OF_B: tl.constexpr, BLOCKED: tl.constexpr):
    """Store an adapter's dA (R, N) or dB (N, R) at offset `start * N`: adapters' gradients lie one after another."""
    start = tl.load(starts_ptr + entry * 2 + (1 if OF_B else 0))
    own_ptr = out_ptr + start.to(tl.int64) * N
    rank = rank_of(shape)
    if BLOCKED and _blocks(shape, OF_B) > 1:
        at, mask = _places(n, r, N, shape, OF_B)
        tl.store(own_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        mask = (n < N)[:, None] & (r < rank)[None, :]
        if OF_B:
            tl.store(own_ptr + n[:, None] * rank + r[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(own_ptr + r[None, :] * N + n[:, None], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add(sums_ptr, acc, n, r, N, shape, OF_B: tl.constexpr, BLOCKED: tl.constexpr):
    """Adds dA (R, N) or dB (N, R) of one adapter to its sums in fp32. No other program has these entries."""
    rank = rank_of(shape)
    if BLOCKED and _blocks(shape, OF_B) > 1:
        places, real = _places(n, r, N, shape, OF_B)
        tl.store(sums_ptr + places, tl.load(sums_ptr + places, mask=real, other=0.0) + acc, mask=real)
    else:
        mask = (n < N)[:, None] & (r < rank)[None, :]
        at = sums_ptr + (n[:, None] * rank + r[None, :] if OF_B else r[None, :] * N + n[:, None])
        tl.store(at, tl.load(at, mask=mask, other=0.0) + acc, mask=mask)


@triton.jit(
    do_not_specialize=["row", "parts"], do_not_specialize_on_alignment=["ranks_ptr", "scalings_ptr", "starts_ptr"]
)
def fold(
    parts_ptr,
    spans_ptr,
    ranks_ptr,
    scalings_ptr,
    starts_ptr,
    sums_ptr,
    N,
    row,
    parts,
    part_stride,
    OF_B: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds the partial sums of `outer` to the `MainGrads`, always in the same order. Grid (blocks of the largest
    matrix, adapters). Loads PARTS of them at a time, to hide the latency of memory."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    entry = tl.load(spans_ptr + tl.program_id(1) * 4 + 2) * row
    shape = tl.load(ranks_ptr + entry)
    start = tl.load(starts_ptr + entry * 2 + (1 if OF_B else 0))
    sums = weights(sums_ptr, entry, 1 if OF_B else 0, scalings_ptr)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < rank_of(shape) // _blocks(shape, OF_B) * N
    part = tl.arange(0, PARTS)
    own = parts_ptr + start.to(tl.int64) * N + part[:, None].to(tl.int64) * part_stride + i[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, parts, PARTS):
        some = tl.load(own, mask=(part < parts - first)[:, None] & mask[None, :], other=0.0)
        total += tl.sum(some, 0)
        own += PARTS * part_stride
    tl.store(sums + i, tl.load(sums + i, mask=mask, other=0.0) + total, mask=mask)
