"""Paged attention of chunks of prompts: tiles of neighbouring new tokens against all pages of their sequence.

A tile's rows are (token, query head of one key-value head's group), so that keys are read once for the whole group and a
tile of few tokens still fills the tensor cores. Keys that every row sees are read without a mask.

Shapes as in `attention_decode`; tiles (N, 4) int32: column of the table (-1: nothing to do), first row of q, tokens,
position of the first.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.attention_device import accumulate, key_rows, score, with_sinks


@triton.jit
def store(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    tiles_ptr,
    k_head,
    k_row,
    v_head,
    v_row,
    table_stride,
    page_stride,
    K,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Writes the tiles' keys and values into their pages."""
    head = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    row = tl.load(tile_ptr)
    if row < 0:
        return
    first = tl.load(tile_ptr + 1)
    tokens = tl.load(tile_ptr + 2)
    position = tl.load(tile_ptr + 3)
    t = tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    mask = (t < tokens)[:, None] & (d < D)[None, :]
    cache = (table_ptr, table_stride, page_stride)
    to = key_rows(cache, row, position + t, t < tokens, K, head, D, PAGE, True)[:, None] + d[None, :]
    k = tl.load(k_ptr + (first + t)[:, None] * k_row + head * k_head + d[None, :], mask=mask)
    v = tl.load(v_ptr + (first + t)[:, None] * v_row + head * v_head + d[None, :], mask=mask)
    tl.store(keys_ptr + to, k, mask=mask)
    tl.store(values_ptr + to, v, mask=mask)


@triton.jit
def prefill(
    q_ptr,
    out_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    tiles_ptr,
    sinks_ptr,
    scale,
    cap,
    window,
    q_head,
    q_row,
    table_stride,
    page_stride,
    K,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    row = tl.load(tile_ptr)
    if row < 0:
        return
    first = tl.load(tile_ptr + 1)
    tokens = tl.load(tile_ptr + 2)
    position = tl.load(tile_ptr + 3)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = m // G
    heads = head * G + m % G
    mask = (token < tokens)[:, None] & (d < D)[None, :]
    q_at = q_ptr + (first + token)[:, None] * q_row + heads[:, None] * q_head + d[None, :]
    q = tl.load(q_at, mask=mask, other=0.0)
    at = position + token
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    begin = 0
    seen = (position + 1) // BLOCK_N * BLOCK_N  # keys ahead of it are seen by every row
    if WINDOW:
        begin = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
        seen = begin
    cache = (table_ptr, table_stride, page_stride)
    for start in range(begin, seen, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k, v = _block(keys_ptr, values_ptr, cache, row, n, n < seen, head, d, K, D, PAGE, False)
        scores = score(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, SOFTCAP)
        top, total, acc = accumulate(scores, v, top, total, acc, False)
    end = position + tokens
    for start in range(seen, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k, v = _block(keys_ptr, values_ptr, cache, row, n, n < end, head, d, K, D, PAGE, True)
        scores = score(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, SOFTCAP)
        visible = n[None, :] <= at[:, None]
        if WINDOW:
            visible = visible & (n[None, :] > (at - window)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        top, total, acc = accumulate(scores, v, top, total, acc, WINDOW)
    if SINKS:
        total, faded = with_sinks(top, total, sinks_ptr, heads, token < tokens)
        acc *= faded[:, None]
    out_at = out_ptr + ((first + token) * K * G + heads)[:, None] * D + d[None, :]
    tl.store(out_at, (acc / tl.maximum(total, 1e-30)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _block(
    keys_ptr, values_ptr, cache, row, n, real, head, d, K, D: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr
):
    """Keys and values at the positions `n`; where MASKED, zero at those that are not `real`."""
    at = key_rows(cache, row, n, real, K, head, D, PAGE, MASKED)[:, None] + d[None, :]
    mask = (d < D)[None, :]
    if MASKED:
        mask = mask & real[:, None]
    return tl.load(keys_ptr + at, mask=mask, other=0.0), tl.load(values_ptr + at, mask=mask, other=0.0)
