"""Paged attention of prompt chunks: tiles of consecutive new tokens against all pages of their sequence.

A tile's rows are (token, query head of one key-value head's group), so that keys are read once for the whole group and
a tile of few tokens still fills the tensor cores. Keys that every row sees are read without a mask.

With SPLIT, several items share a tile, each with a range of its keys. The last one to finish joins their results, as in
the decode kernel.

Shapes are those of the decode kernel. tiles (N, 8) int32, one row per item: column of the table, first row of q,
tokens, position of the first token, first key, key after the last, first item of the tile, items of the tile. With
SPLIT, an item with 0 tokens and first item -1 is idle. parts (N, K, BLOCK_M, E), stats (N, K, BLOCK_M) and counters (N,
K) are scratch; counters are 0 before and after.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.attention.triton_paged.softmax import LOWEST, accumulate, as_cached, offsets, score, with_sinks


@triton.jit(do_not_specialize=["table_stride"])
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
    E: tl.constexpr,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Writes the tiles' keys and values into their pages."""
    head = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 8
    if tl.load(tile_ptr + 6) != tl.program_id(1):
        return
    row = tl.load(tile_ptr)
    first = tl.load(tile_ptr + 1)
    tokens = tl.load(tile_ptr + 2)
    position = tl.load(tile_ptr + 3)
    SHARED: tl.constexpr = E if LATENT else 0  # as in decode
    VALUE: tl.constexpr = D if LATENT else E
    t = tl.arange(0, BLOCK_T)
    d = SHARED + tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    k_mask = (t < tokens)[:, None] & (d < D)[None, :]
    v_mask = (t < tokens)[:, None] & (e < E)[None, :]
    page = tl.load(table_ptr + row + (position + t) // PAGE * table_stride, mask=t < tokens, other=0)
    key_at = offsets(page, page_stride, position + t, K, head, D, PAGE)[:, None] + d[None, :]
    value_at = offsets(page, page_stride, position + t, K, head, VALUE, PAGE)[:, None] + e[None, :]
    k = tl.load(k_ptr + (first + t)[:, None] * k_row + head * k_head + d[None, :], mask=k_mask)
    v = tl.load(v_ptr + (first + t)[:, None] * v_row + head * v_head + e[None, :], mask=v_mask)
    tl.store(keys_ptr + key_at, as_cached(k, keys_ptr), mask=k_mask)
    tl.store(values_ptr + value_at, as_cached(v, values_ptr), mask=v_mask)


@triton.jit(do_not_specialize=["table_stride"])
def prefill(
    q_ptr,
    out_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    tiles_ptr,
    parts_ptr,
    stats_ptr,
    counters_ptr,
    sinks_ptr,
    scale,
    cap,
    window,
    q_head,
    q_row,
    table_stride,
    page_stride,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head = tl.program_id(0)
    item = tl.program_id(1)
    tile_ptr = tiles_ptr + item * 8
    row = tl.load(tile_ptr)
    first = tl.load(tile_ptr + 1)
    tokens = tl.load(tile_ptr + 2)
    position = tl.load(tile_ptr + 3)
    if SPLIT:  # noqa: SIM102 - a constant at compile time
        if tokens == 0:
            return
    SHARED: tl.constexpr = E if LATENT else 0  # as in decode
    VALUE: tl.constexpr = D if LATENT else E
    STORED: tl.constexpr = 1 if LATENT else K
    kv = head % STORED
    m = tl.arange(0, BLOCK_M)
    d = SHARED + tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    r = tl.arange(0, BLOCK_N)
    token = m // G
    heads = head * G + m % G
    in_d = (d < D)[None, :]
    in_e = (e < E)[None, :]
    mask = (token < tokens)[:, None] & in_e
    q_at = q_ptr + (first + token)[:, None] * q_row + heads[:, None] * q_head
    q = tl.load(q_at + d[None, :], mask=(token < tokens)[:, None] & in_d, other=0.0)
    if LATENT:
        latent_q = tl.load(q_at + e[None, :], mask=mask, other=0.0)
    at = position + token
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    begin = 0
    seen = (position + 1) // BLOCK_N * BLOCK_N  # every row sees the keys before it
    if WINDOW:
        begin = _first(position, window, CHUNKED) // BLOCK_N * BLOCK_N
        seen = begin
    end = position + tokens
    if SPLIT:
        begin = tl.load(tile_ptr + 4)
        end = tl.load(tile_ptr + 5)
        seen = begin if WINDOW else tl.maximum(tl.minimum(seen, end), begin)
    table_at = table_ptr + row
    # Page ids are loaded a step before their keys, so that loads of keys can be issued one step earlier.
    page = tl.load(table_at + tl.minimum(begin + r, end - 1) // PAGE * table_stride)
    for start in range(begin, seen, BLOCK_N):
        key_at = offsets(page, page_stride, start + r, STORED, kv, D, PAGE)[:, None] + d[None, :]
        value_at = offsets(page, page_stride, start + r, STORED, kv, VALUE, PAGE)[:, None] + e[None, :]
        page = tl.load(table_at + tl.minimum(start + BLOCK_N + r, end - 1) // PAGE * table_stride)
        if D - SHARED == BLOCK_D:
            k = tl.load(keys_ptr + key_at).to(q.dtype)
        else:
            k = tl.load(keys_ptr + key_at, mask=in_d, other=0.0).to(q.dtype)
        if E == BLOCK_E:
            v = tl.load(values_ptr + value_at).to(q.dtype)
        else:
            v = tl.load(values_ptr + value_at, mask=in_e, other=0.0).to(q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if LATENT:
            products = tl.dot(latent_q, tl.trans(v), products, input_precision="ieee")
        if SOFTCAP:
            scores = score(products, scale, cap, SOFTCAP)
            top, total, acc = accumulate(scores, v, top, total, acc, False)
        else:  # as `accumulate`, with scale and maximum applied in one fused multiply-add
            new_top = tl.maximum(top, tl.max(products, 1) * scale)
            weights = tl.exp2(products * scale - new_top[:, None])
            faded = tl.exp2(top - new_top)
            total = total * faded + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * faded[:, None], input_precision="ieee")
            top = new_top
    for start in range(seen, end, BLOCK_N):
        n = start + r
        key_at = offsets(page, page_stride, n, STORED, kv, D, PAGE)[:, None] + d[None, :]
        value_at = offsets(page, page_stride, n, STORED, kv, VALUE, PAGE)[:, None] + e[None, :]
        page = tl.load(table_at + tl.minimum(n + BLOCK_N, end - 1) // PAGE * table_stride)
        real = (n < end)[:, None]
        k = tl.load(keys_ptr + key_at, mask=real & in_d, other=0.0).to(q.dtype)
        v = tl.load(values_ptr + value_at, mask=real & in_e, other=0.0).to(q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if LATENT:
            products = tl.dot(latent_q, tl.trans(v), products, input_precision="ieee")
        scores = score(products, scale, cap, SOFTCAP)
        visible = n[None, :] <= at[:, None]
        if WINDOW:
            visible = visible & (n[None, :] >= _first(at, window, CHUNKED)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        top, total, acc = accumulate(scores, v, top, total, acc, WINDOW or SPLIT)
    if SPLIT:
        count = tl.load(tile_ptr + 7)
        if count > 1:
            joined = tl.load(tile_ptr + 6)
            part = (item * K + head) * BLOCK_M + m
            part_at = parts_ptr + part[:, None] * E + e[None, :]
            tl.store(part_at, acc / tl.maximum(total, 1e-30)[:, None], mask=mask)
            tl.store(stats_ptr + part, tl.where(total > 0.0, top + tl.log2(total), LOWEST))
            tl.debug_barrier()  # as in decode
            ended = tl.atomic_add(counters_ptr + joined * K + head, 1, sem="acq_rel")
            if ended != count - 1:
                return
            tl.store(counters_ptr + joined * K + head, 0)
            top, total, acc = _joined(parts_ptr, stats_ptr, joined, count, head, mask, K, E, BLOCK_M, BLOCK_E)
    if SINKS:
        total, faded = with_sinks(top, total, sinks_ptr, heads, token < tokens)
        acc *= faded[:, None]
    out_at = out_ptr + ((first + token) * K * G + heads)[:, None] * E + e[None, :]
    tl.store(out_at, (acc / tl.maximum(total, 1e-30)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _first(position, window, CHUNKED: tl.constexpr):
    """See `Window.first`."""
    if CHUNKED:
        return position - position % window
    return tl.maximum(position - window + 1, 0)


@triton.jit
def _joined(
    parts_ptr,
    stats_ptr,
    first,
    count,
    head,
    mask,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Combine the parts of a tile's items: return maximum scores, sums of weights and weighted values. Loads bypass L1,
    as in decode."""
    m = tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    top = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    for i in range(count):
        part = ((first + i) * K + head) * BLOCK_M + m
        some = tl.load(parts_ptr + part[:, None] * E + e[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        its = tl.load(stats_ptr + part, cache_modifier=".cg")
        new_top = tl.maximum(top, its)
        faded = tl.exp2(top - new_top)
        weight = tl.exp2(its - new_top)
        total = total * faded + weight
        acc = acc * faded[:, None] + some * weight[:, None]
        top = new_top
    return top, total, acc
