"""Paged attention of single new tokens: reading the keys and values is all the work there is.

A program takes one item, a stretch of one sequence's keys, for one key-value head and all query heads of its group.
The host cuts sequences into items of about one size (`attention_plan.decode_items`), so that one long sequence does not
hold up the rest (flash-decoding, with the plan of FlashInfer, §3.3.1). The program that ends last for a sequence and head
joins their results. The program with the sequence's last key takes it from k and v as they come from the layer, and
writes it to its page on the way: no kernel of its own does that. Items do not depend on the kernel ahead: they are read
before the wait for its end (programmatic dependent launch).

q (H, T, D), k, v (K, T, D), any strides but 1 for D; keys, values (pages, PAGE, K, D), contiguous within
a page; out (T, H, D); items (W, 8) int32:
column of the table (-1: nothing to do), row of q, first key, key after the last, first item of the sequence, its items
(0: write zeros), whether the last key is the new one. parts (W, H, D), stats (W, H) and counters (rows, K) are scratch;
counters are 0 before and after.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.attention_device import accumulate, key_offsets, key_rows, score, with_sinks


@triton.jit
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
    K,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    item = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    item_ptr = items_ptr + item * 8
    row = tl.load(item_ptr)
    at = tl.load(item_ptr + 1)
    begin = tl.load(item_ptr + 2)
    end = tl.load(item_ptr + 3)
    first = tl.load(item_ptr + 4)
    count = tl.load(item_ptr + 5)
    newest = tl.load(item_ptr + 6)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if row < 0:
        return
    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    mask = (g < G)[:, None] & in_d[None, :]
    out_at = out_ptr + ((at * K + head) * G + g)[:, None] * D + d[None, :]
    if count == 0:
        tl.store(out_at, tl.zeros([BLOCK_M, BLOCK_D], dtype=out_ptr.dtype.element_ty), mask=mask)
        return
    q = tl.load(q_ptr + at * q_row + (head * G + g)[:, None] * q_head + d[None, :], mask=mask, other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if newest:
        end -= 1
        k_new = tl.load(k_ptr + at * k_row + head * k_head + d, mask=in_d, other=0.0)
        v_new = tl.load(v_ptr + at * v_row + head * v_head + d, mask=in_d, other=0.0)
        new_at = key_rows((table_ptr, table_stride, page_stride), row, end, True, K, head, D, PAGE, False) + d
        tl.store(keys_ptr + new_at, k_new, mask=in_d)
        tl.store(values_ptr + new_at, v_new, mask=in_d)
        top = score(tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1), scale, cap, SOFTCAP)
        total += 1.0
        acc += v_new.to(tl.float32)[None, :]
    n = begin + tl.arange(0, BLOCK_N)
    page = tl.load(table_ptr + (n // PAGE) * table_stride + row, mask=n < end, other=0)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        key_at = key_offsets(page, page_stride, n, K, head, D, PAGE)[:, None] + d[None, :]
        key_mask = (n < end)[:, None] & in_d[None, :]
        # A step ahead: were it loaded where it is used, the loads of keys could not be asked for ahead.
        n_next = n + BLOCK_N
        page = tl.load(table_ptr + (n_next // PAGE) * table_stride + row, mask=n_next < end, other=0)
        k = tl.load(keys_ptr + key_at, mask=key_mask, other=0.0)
        v = tl.load(values_ptr + key_at, mask=key_mask, other=0.0)
        scores = score(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, SOFTCAP)
        scores = tl.where((n < end)[None, :], scores, float("-inf"))
        top, total, acc = accumulate(scores, v, top, total, acc, False)
    if count == 1:
        if SINKS:
            total, faded = with_sinks(top, total, sinks_ptr, head * G + g, g < G)
            acc *= faded[:, None]
        tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        return
    part = (item * K + head) * G + g
    tl.store(parts_ptr + part[:, None] * D + d[None, :], acc / total[:, None], mask=mask)
    tl.store(stats_ptr + part, top + tl.log2(total), mask=g < G)
    tl.debug_barrier()  # the whole program's parts are written before one of its threads says so
    ended = tl.atomic_add(counters_ptr + row * K + head, 1, sem="acq_rel")
    if ended == count - 1:
        tl.store(counters_ptr + row * K + head, 0)
        ptrs = (parts_ptr, stats_ptr, sinks_ptr, out_ptr)
        _join(ptrs, first, count, head, at, K, G, D, SINKS, BLOCK_S, BLOCK_G, BLOCK_D)


@triton.jit
def _join(
    ptrs,
    first,
    count,
    head,
    at,
    K,
    G: tl.constexpr,
    D: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The softmax over a sequence's items, of their parts. Reads past L1, which other programs' stores do not reach."""
    parts_ptr, stats_ptr, sinks_ptr, out_ptr = ptrs
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    mask = (g < G)[:, None] & (d < D)[None, :]
    top = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    for start in range(0, count, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        part = (((first + s) * K + head) * G)[:, None] + g[None, :]
        real = (s < count)[:, None] & (g < G)[None, :]
        some_at = parts_ptr + part[:, :, None] * D + d[None, None, :]
        some = tl.load(some_at, mask=real[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg")
        tops = tl.load(stats_ptr + part, mask=real, other=float("-inf"), cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # rows that pad the group
        faded = tl.exp2(top - base)
        weights = tl.exp2(tops - base[None, :])
        total = total * faded + tl.sum(weights, 0)
        acc = acc * faded[:, None] + tl.sum(some * weights[:, :, None], 0)
        top = new_top
    if SINKS:
        total, faded = with_sinks(top, total, sinks_ptr, head * G + g, g < G)
        acc *= faded[:, None]
    out_at = out_ptr + ((at * K + head) * G + g)[:, None] * D + d[None, :]
    tl.store(out_at, (acc / tl.maximum(total, 1e-30)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
