"""Gradients of all matrices of one group of sites in one launch; `backward_kernel.outer` has one for A and one for each
B, and `fold` behind each of them whose sums are in parts.

Programs of x's columns compute dA of every site, programs of a dy's columns dB of its site. If an adapter's tokens are
divided among programs, each writes its sum in fp32, and the last one to finish adds them up, always in the same order,
as in `prefill_kernel.finish`. Shapes: see `backward_kernel`; parts: (programs, G, parts, BLOCK_N, BLOCK_R) fp32.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.lora.segmented.backward_kernel import add_to_sums, covers
from coserve.kernels.lora.segmented.loads import output, padded, rank_of, shape_at, weights


@triton.jit(do_not_specialize=["row", "T", "parts"], do_not_specialize_on_alignment=["ranks_ptr", "scalings_ptr"])
def outer_together(
    x_ptr,
    dy0_ptr,
    dy1_ptr,
    dy2_ptr,
    g_ptr,
    h_ptr,
    parts_ptr,
    counters_ptr,
    tiles_ptr,
    spans_ptr,
    ranks_ptr,
    scalings_ptr,
    sums_ptr,
    D,
    O0,
    O1,
    O2,
    x_stride,
    dy0_stride,
    dy1_stride,
    dy2_stride,
    row,
    T,
    R,
    parts,
    SITES: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (column blocks of x and of every dy, adapters, parts of rank blocks)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    span_ptr = spans_ptr + tl.program_id(1) * 4
    part = tl.program_id(2) % parts
    rank_block = tl.program_id(2) // parts
    first = rank_block * BLOCK_R
    first_tile = tl.load(span_ptr)
    tiles = tl.load(span_ptr + 1)
    slot = tl.load(span_ptr + 2)
    block = tl.program_id(0)
    of_x = tl.cdiv(D, BLOCK_N)
    dys, strides = (dy0_ptr, dy1_ptr, dy2_ptr), (dy0_stride, dy1_stride, dy2_stride)
    of_y = tl.maximum(block - of_x, 0)
    site, y_block, dy_ptr, O, dy_stride = output(of_y, dys, (O0, O1, O2), strides, SITES, ALIGNED, BLOCK_N)
    shape0 = shape_at(ranks_ptr, slot, row, 0)
    shape1 = shape_at(ranks_ptr, slot, row, 1) if SITES > 1 else 0
    shape2 = shape_at(ranks_ptr, slot, row, 2) if SITES > 2 else 0
    shape = shape_at(ranks_ptr, slot, row, site)
    if block < of_x:
        some = covers(shape0, block * BLOCK_N, first, D, False, BLOCK_N, BLOCK_R, BLOCKED)
        if SITES > 1:
            some = some | covers(shape1, block * BLOCK_N, first, D, False, BLOCK_N, BLOCK_R, BLOCKED)
        if SITES > 2:
            some = some | covers(shape2, block * BLOCK_N, first, D, False, BLOCK_N, BLOCK_R, BLOCKED)
    else:
        some = covers(shape, y_block * BLOCK_N, first, O, True, BLOCK_N, BLOCK_R, BLOCKED)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if not some:
        return
    place = (block * tl.num_programs(1) + tl.program_id(1)) * (tl.num_programs(2) // parts) + rank_block
    own_parts = parts_ptr + place.to(tl.int64) * SITES * parts * BLOCK_N * BLOCK_R
    begin, end = first_tile + tiles * part // parts, first_tile + tiles * (part + 1) // parts
    entry = slot * row
    r = first + tl.arange(0, BLOCK_R)
    if block < of_x:
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        ranks = (rank_of(shape0), rank_of(shape1) if SITES > 1 else 0, rank_of(shape2) if SITES > 2 else 0)
        acc0, acc1, acc2 = _products(
            x_ptr, x_stride, g_ptr, tiles_ptr, begin, end, n, r, D, T, R, ranks, SITES, BLOCK_T, BLOCK_N, BLOCK_R
        )
        last = True
        if SPLIT:
            _put(own_parts, acc0, 0, part, parts, BLOCK_N, BLOCK_R)
            if SITES > 1:
                _put(own_parts, acc1, 1, part, parts, BLOCK_N, BLOCK_R)
            if SITES > 2:
                _put(own_parts, acc2, 2, part, parts, BLOCK_N, BLOCK_R)
            last = _is_last(counters_ptr + place, parts)
        if last:
            if SPLIT:
                acc0 = _total(own_parts, 0, parts, BLOCK_N, BLOCK_R)
                if SITES > 1:
                    acc1 = _total(own_parts, 1, parts, BLOCK_N, BLOCK_R)
                if SITES > 2:
                    acc2 = _total(own_parts, 2, parts, BLOCK_N, BLOCK_R)
            add_to_sums(weights(sums_ptr, entry, 0, scalings_ptr), acc0, n, r, D, shape0, False, BLOCKED)
            if SITES > 1:
                add_to_sums(weights(sums_ptr, entry + 1, 0, scalings_ptr), acc1, n, r, D, shape1, False, BLOCKED)
            if SITES > 2:
                add_to_sums(weights(sums_ptr, entry + 2, 0, scalings_ptr), acc2, n, r, D, shape2, False, BLOCKED)
    else:
        n = y_block * BLOCK_N + tl.arange(0, BLOCK_N)
        ranks = (rank_of(shape), 0, 0)
        own_h = h_ptr + site * T * R
        acc, _, _ = _products(
            dy_ptr, dy_stride, own_h, tiles_ptr, begin, end, n, r, O, T, R, ranks, 1, BLOCK_T, BLOCK_N, BLOCK_R
        )
        last = True
        if SPLIT:
            _put(own_parts, acc, 0, part, parts, BLOCK_N, BLOCK_R)
            last = _is_last(counters_ptr + place, parts)
        if last:
            if SPLIT:
                acc = _total(own_parts, 0, parts, BLOCK_N, BLOCK_R)
            acc *= tl.load(scalings_ptr + entry + site)
            add_to_sums(weights(sums_ptr, entry + site, 1, scalings_ptr), acc, n, r, O, shape, True, BLOCKED)


@triton.jit
def _products(
    u_ptr,
    u_stride,
    v_ptr,
    tiles_ptr,
    begin,
    end,
    n,
    r,
    N,
    T,
    R,
    ranks,
    SITES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Sum over the tiles [begin, end) of u[t, n] v_site[t, r], for up to three sites."""
    rank0, rank1, rank2 = ranks
    t = tl.arange(0, BLOCK_T)
    acc0 = tl.zeros([BLOCK_N, BLOCK_R], dtype=tl.float32)
    acc1 = acc0
    acc2 = acc0
    for tile in range(begin, end):
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
    return acc0, acc1, acc2


@triton.jit
def _put(own_parts, acc, site, part, parts, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    tl.store(own_parts + (site * parts + part) * (BLOCK_N * BLOCK_R) + at, acc)


@triton.jit
def _is_last(counter_ptr, parts):
    """Count the program, whose part is written; the last one of a sum resets the counter."""
    tl.debug_barrier()  # all threads have written before one counts the program
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == parts - 1
    if last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed")
    return last


@triton.jit
def _total(own_parts, site, parts, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    """Sum a site's parts in order, four loads at once, to hide the latency of memory."""
    at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    own = own_parts + site * parts * (BLOCK_N * BLOCK_R) + at
    total = tl.zeros([BLOCK_N, BLOCK_R], dtype=tl.float32)
    for first in range(0, parts, 4):
        for more in tl.static_range(4):
            mask = (first + more < parts) & (at >= 0)
            total += tl.load(own + (first + more) * (BLOCK_N * BLOCK_R), mask=mask, other=0.0)
    return total
