"""Paged attention of decode: one new token per sequence. The time goes into reading keys and values.

With LATENT (multi-head latent attention) the cache has one head, whose values are the first E numbers of its keys, read
once; the query heads are in K groups of G all the same, as many as a program can compute.

A program computes one item, a range of one sequence's keys, for one key-value head and all query heads of its group.
The host cuts sequences into items of similar size (`plan.decode_items`), so that one long sequence does not delay the
step (flash-decoding, with the plan of FlashInfer, §3.3.1). The last program to finish for a sequence and head joins
their results. The program with the sequence's last key takes it from the layer's k and v and also writes it to its
page, which saves a kernel. Items and page ids do not depend on the preceding kernel: they are read before the wait for
its end (programmatic dependent launch).

With few sequences latency dominates, so an item's first keys are requested as early as possible. Loads in the loop have
no mask: beyond the last key, that key is read again with weight 0. Page ids are read one step ahead of the keys that
need them. Each thread keeps a sum of weights of its own until the end. A cache in FP8 is read as q's type.

q (H, T, D), k (K, T, D), v (K, T, E), any strides but 1 for D and E; keys (pages, PAGE, K, D), values (pages, PAGE, K,
E), contiguous within a page; out (T, H, E); items (W, 8) int32: column of the table (-1: nothing to do), row of q,
first key, key after the last, first item of the sequence, its items (0: write zeros), whether the last key is the new
one. parts (W, H, E), stats (W, H) and counters (rows, K) are scratch; counters are 0 before and after.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.attention.triton_paged.softmax import LOWEST, as_cached, offsets, score, with_sinks


@triton.jit(do_not_specialize=["table_stride"])
def decode(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    items_ptr,
    counters_ptr,
    parts_ptr,
    stats_ptr,
    sinks_ptr,
    scale,
    cap,
    q_head,
    q_row,
    k_head,
    k_row,
    v_head,
    v_row,
    table_stride,
    page_stride,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    item = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    item_ptr = items_ptr + item * 8
    row = tl.load(item_ptr)
    if row < 0:  # idle: no wait for the preceding kernel, since the other programs wait
        return
    at = tl.load(item_ptr + 1)
    begin = tl.load(item_ptr + 2)
    end = tl.load(item_ptr + 3)
    first = tl.load(item_ptr + 4)
    count = tl.load(item_ptr + 5)
    newest = tl.load(item_ptr + 6)
    old = end - newest  # the newest key is not in the cache yet
    last = tl.maximum(old - 1, 0)
    table_at = table_ptr + row
    r = tl.arange(0, BLOCK_N)
    n = tl.minimum(begin + r, last)
    page = tl.load(table_at + n // PAGE * table_stride)
    new_page = tl.load(table_at + tl.maximum(end - 1, 0) // PAGE * table_stride)
    if PDL:
        tl.extra.cuda.gdc_wait()
    SHARED: tl.constexpr = E if LATENT else 0  # numbers of a key that are its value
    VALUE: tl.constexpr = D if LATENT else E  # numbers from one value to the next
    STORED: tl.constexpr = 1 if LATENT else K  # heads in the cache
    kv = head % STORED
    g = tl.arange(0, BLOCK_M)
    d = SHARED + tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    in_d = d < D
    in_e = e < E
    heads = head * G + g
    mask = (g < G)[:, None] & in_e[None, :]
    out_at = out_ptr + (at * K * G + heads)[:, None] * E + e[None, :]
    if count == 0:
        tl.store(out_at, tl.zeros([BLOCK_M, BLOCK_E], dtype=out_ptr.dtype.element_ty), mask=mask)
        return
    q_mask = (g < G)[:, None] & in_d[None, :]
    q = tl.load(q_ptr + at * q_row + heads[:, None] * q_head + d[None, :], mask=q_mask, other=0.0)
    if LATENT:
        latent_q = tl.load(q_ptr + at * q_row + heads[:, None] * q_head + e[None, :], mask=mask, other=0.0)
    k_new = as_cached(tl.load(k_ptr + at * k_row + kv * k_head + d, mask=in_d, other=0.0), keys_ptr)
    v_new = as_cached(tl.load(v_ptr + at * v_row + kv * v_head + e, mask=in_e, other=0.0), values_ptr)
    top = tl.full([BLOCK_M], LOWEST, dtype=tl.float32)
    totals = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    for start in range(begin, old, BLOCK_N):
        key_at = offsets(page, page_stride, n, STORED, kv, D, PAGE)[:, None] + d[None, :]
        value_at = offsets(page, page_stride, n, STORED, kv, VALUE, PAGE)[:, None] + e[None, :]
        n = tl.minimum(start + BLOCK_N + r, last)
        page = tl.load(table_at + n // PAGE * table_stride)
        if D - SHARED == BLOCK_D:
            k = tl.load(keys_ptr + key_at).to(q.dtype)
        else:
            k = tl.load(keys_ptr + key_at, mask=in_d[None, :], other=0.0).to(q.dtype)
        if E == BLOCK_E:
            v = tl.load(values_ptr + value_at).to(q.dtype)
        else:
            v = tl.load(values_ptr + value_at, mask=in_e[None, :], other=0.0).to(q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if LATENT:
            products = tl.dot(latent_q, tl.trans(v), products, input_precision="ieee")
        scores = score(products, scale, cap, SOFTCAP)
        scores = tl.where((start + r < old)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        faded = tl.exp2(top - new_top)
        totals = totals * faded[:, None] + weights
        acc = tl.dot(weights.to(v.dtype), v, acc * faded[:, None], input_precision="ieee")
        top = new_top
    total = tl.sum(totals, 1)
    if newest:
        new_key = offsets(new_page, page_stride, old, STORED, kv, D, PAGE) + d
        new_value = offsets(new_page, page_stride, old, STORED, kv, VALUE, PAGE) + e
        tl.store(keys_ptr + new_key, k_new, mask=in_d)
        tl.store(values_ptr + new_value, v_new, mask=in_e)
        product = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1)
        if LATENT:
            product += tl.sum(latent_q.to(tl.float32) * v_new.to(tl.float32)[None, :], 1)
        new_score = score(product, scale, cap, SOFTCAP)
        new_top = tl.maximum(top, new_score)
        faded = tl.exp2(top - new_top)
        weight = tl.exp2(new_score - new_top)
        total = total * faded + weight
        acc = acc * faded[:, None] + weight[:, None] * v_new.to(tl.float32)[None, :]
        top = new_top
    if count == 1:
        if SINKS:
            total, faded = with_sinks(top, total, sinks_ptr, heads, g < G)
            acc *= faded[:, None]
        tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        return
    part = item * K * G + heads
    tl.store(parts_ptr + part[:, None] * E + e[None, :], acc / total[:, None], mask=mask)
    tl.store(stats_ptr + part, top + tl.log2(total), mask=g < G)
    tl.debug_barrier()  # all threads have written before one counts the program
    ended = tl.atomic_add(counters_ptr + row * K + head, 1, sem="acq_rel")
    if ended == count - 1:
        tl.store(counters_ptr + row * K + head, 0)
        ptrs = (parts_ptr, stats_ptr, sinks_ptr, out_ptr)
        _join(ptrs, first, count, head, at, K, G, E, SINKS, BLOCK_G, BLOCK_E, UNROLL)


@triton.jit
def _join(
    ptrs,
    first,
    count,
    head,
    at,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Combine the partial results of a sequence's items into its attention output. Loads bypass the L1 cache, which
    other programs' stores do not update.

    Parts are added in order, UNROLL of them loaded at a time. A thread has the same elements of every part, so threads
    exchange no data.
    """
    parts_ptr, stats_ptr, sinks_ptr, out_ptr = ptrs
    g = tl.arange(0, BLOCK_G)
    e = tl.arange(0, BLOCK_E)
    heads = head * G + g
    mask = (g < G)[:, None] & (e < E)[None, :]
    top = tl.full([BLOCK_G], LOWEST, dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_E], dtype=tl.float32)
    for start in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            # Beyond the last item its result is read again, with weight 0.
            part = (first + tl.minimum(start + i, count - 1)) * (K * G) + heads
            some = tl.load(parts_ptr + part[:, None] * E + e[None, :], mask=mask, other=0.0, cache_modifier=".cg")
            its = tl.load(stats_ptr + part, mask=g < G, other=LOWEST, cache_modifier=".cg")
            new_top = tl.maximum(top, its)
            faded = tl.exp2(top - new_top)
            weight = tl.where(start + i < count, tl.exp2(its - new_top), 0.0)
            total = total * faded + weight
            acc = acc * faded[:, None] + some * weight[:, None]
            top = new_top
    if SINKS:
        total, faded = with_sinks(top, total, sinks_ptr, heads, g < G)
        acc *= faded[:, None]
    out_at = out_ptr + (at * K * G + heads)[:, None] * E + e[None, :]
    tl.store(out_at, (acc / tl.maximum(total, 1e-30)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
