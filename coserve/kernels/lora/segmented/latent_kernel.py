"""LoRA terms of the absorbed products of multi-head latent attention, by tiles of rows of one adapter; letters as in
`kernels.lora.latent`. A program computes one tile for one head: both products, as neither reads much.

    queries  y[h, t, k] += scaling Σ_r (Σ_n x[h, t, n] B[h (N + E) + n, r]) A[r, k]
    outputs  y[h, t, e] += scaling Σ_r (Σ_k x[h, t, k] A[r, k]) B[h (N + E) + N + e, r]

x (H, T, N) and y (H, T, L) with QUERIES, else x (H, T, L) and y (H, T, E): any strides, but 1 for the last dimension.
tiles (tiles, 4) int32: first row, rows (0: inactive), slot (-1: no adapter), unused here. The table and `row`: see the
decode kernels.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.lora.segmented.loads import (
    a_blocks,
    a_rows,
    b_blocks,
    b_rows,
    load_b_rows,
    rank_of,
    shape_at,
    weights,
    within,
)


@triton.jit(
    do_not_specialize=["row"],
    do_not_specialize_on_alignment=["tiles_ptr", "ranks_ptr", "scalings_ptr", "addresses_ptr"],
)
def terms(
    x_ptr,
    y_ptr,
    tiles_ptr,
    addresses_ptr,
    ranks_ptr,
    scalings_ptr,
    x_head,
    x_row,
    y_head,
    y_row,
    row,
    L: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCKED: tl.constexpr,
):
    """Grid (heads, tiles)."""
    head = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    first = tl.load(tile_ptr).to(tl.int64)
    rows = tl.load(tile_ptr + 1)
    slot = tl.load(tile_ptr + 2)
    shape = shape_at(ranks_ptr, slot, row, 0)
    rank = rank_of(shape)
    if (rows == 0) | (rank == 0):
        return
    entry = slot * row
    scaling = tl.load(scalings_ptr + entry)
    a_ptr = weights(addresses_ptr, entry, 0, x_ptr)
    b_ptr = weights(addresses_ptr, entry, 1, x_ptr)
    t = tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_O)
    width: tl.constexpr = N if QUERIES else E
    begin = head * (N + E) + (0 if QUERIES else N)
    o = begin + i
    end = begin + width
    b_length = (rank + 7) // 8 * 8
    b_own = tl.zeros([BLOCK_O], dtype=tl.int32)
    if BLOCKED and b_blocks(shape) > 1:
        b_length, b_own, _, _ = b_rows(shape, o, begin, BLOCK_O, tl.num_programs(0) * (N + E))
    x_at = x_ptr + head.to(tl.int64) * x_head + (first + t)[:, None] * x_row
    y_at = y_ptr + head.to(tl.int64) * y_head + (first + t)[:, None] * y_row
    real = (t < rows)[:, None]
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        a_length = L
        a_own = tl.zeros([BLOCK_R], dtype=tl.int32)
        if BLOCKED and a_blocks(shape) > 1:
            a_length, a_own = a_rows(shape, r, L)
        b = load_b_rows(b_ptr, o, r, end, b_own, b_length, True)
        b = tl.where((r < rank)[None, :], b, 0.0)
        if QUERIES:
            q = tl.load(x_at + i[None, :], mask=real & (i < N)[None, :], other=0.0)
            h = tl.dot(q, b, input_precision="ieee") * scaling
        else:
            h = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
        for k0 in range(0, L, BLOCK_L):
            k = k0 + tl.arange(0, BLOCK_L)
            a_mask = (r < rank)[:, None] & (k < L)[None, :] & within(k[None, :], a_own[:, None], a_length, True)
            a = tl.load(a_ptr + (r * a_length - a_own)[:, None] + k[None, :], mask=a_mask, other=0.0)
            mask = real & (k < L)[None, :]
            if QUERIES:
                y = tl.load(y_at + k[None, :], mask=mask, other=0.0)
                y = y.to(tl.float32) + tl.dot(h.to(a.dtype), a, input_precision="ieee")
                tl.store(y_at + k[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
            else:
                x = tl.load(x_at + k[None, :], mask=mask, other=0.0)
                h = tl.dot(x, tl.trans(a), h, input_precision="ieee")
        if not QUERIES:
            mask = real & (i < E)[None, :]
            y = tl.load(y_at + i[None, :], mask=mask, other=0.0).to(tl.float32)
            y += tl.dot((h * scaling).to(b.dtype), tl.trans(b), input_precision="ieee")
            tl.store(y_at + i[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
