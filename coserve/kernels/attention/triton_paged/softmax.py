"""Device functions shared by the attention kernels: scores, addresses of keys, one step of the online softmax."""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)
"""Initial maximum of the scores; finite, so that differences from it are not NaN."""


@triton.jit
def score(products, scale, cap, SOFTCAP: tl.constexpr):
    """Scores in units of log 2, from products of queries and keys; `scale`, `cap`: from `launch._score_units`."""
    if SOFTCAP:
        return cap * (1.0 - 2.0 / (tl.exp2(tl.minimum(products * scale, 64.0)) + 1.0))  # tanh
    return products * scale


@triton.jit
def offsets(page, page_stride, n, K, head, WIDTH: tl.constexpr, PAGE: tl.constexpr):
    """Return the offsets of the keys (or values) of positions `n`, which are in `page`, in a layer's cache; in elements
    (int64: a pool of pages is large)."""
    return page.to(tl.int64) * page_stride + ((n % PAGE) * K + head) * WIDTH


@triton.jit
def as_cached(x, cache_ptr):
    """Round keys or values as the cache stores them. FP8 has no infinity: what exceeds its range becomes its largest
    number; NaN stays."""
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(cache_ptr.dtype.element_ty)


@triton.jit
def accumulate(scores, v, top, total, acc, HOLES: tl.constexpr):
    """One step of the online softmax: adds a block of keys. `HOLES`: a row may have seen no key yet."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = new_top
    if HOLES:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    faded = tl.exp2(top - base)
    total = total * faded + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * faded[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def with_sinks(top, total, sinks_ptr, heads, mask):
    """Return the softmax's total with each row's sink (a score without a value) added, and the factor that scales the
    values."""
    sink = tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * 1.4426950408889634
    new_top = tl.maximum(top, sink)
    faded = tl.exp2(top - new_top)
    return total * faded + tl.exp2(sink - new_top), faded
