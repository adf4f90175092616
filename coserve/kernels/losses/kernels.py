"""Losses of rows of logits, and their gradients, which overwrite the logits. A row is read twice and written once.

The first loop over a row keeps, for each column of a program's block, the largest logit and the sum of exponentials
relative to it (online softmax: Milakov and Gimelshein 2018). Arithmetic is fp32.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)
"""Below every finite logit, but finite itself, so that differences from it are not NaN."""
LEAST_OUTSIDE = tl.constexpr(1e-6)
"""Floor of the probability of all tokens outside the candidates, whose logarithm must be finite."""


@triton.jit
def _add(largest, total, x):
    """Add x to the running sum of exponentials, with one `exp`: the larger of x and `largest` is the new reference."""
    above = x - largest
    smaller = tl.exp(-tl.abs(above))
    return tl.maximum(largest, x), tl.where(above > 0, total * smaller + 1.0, total + smaller)


@triton.jit
def _join(largest, total):
    """Return the largest logit of all columns, and the logarithm of the sum of exponentials relative to it."""
    top = tl.max(largest, 0)
    return top, tl.log(tl.sum(total * tl.exp(largest - top), 0))


@triton.jit
def _keep(found_ptr, row, loss, predicted):
    tl.store(found_ptr + 2 * row, loss.to(tl.float64))
    tl.store(found_ptr + 2 * row + 1, predicted.to(tl.float64))


@triton.jit
def likelihood(logits_ptr, labels_ptr, found_ptr, stride, V, BLOCK: tl.constexpr):
    """Grid (rows). logits: (K, V), any float dtype; labels: (K), int64; found: (K, 2), fp64."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    at_label = tl.load(logits_ptr + label).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    largest, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        v = start + columns
        x = tl.load(logits_ptr + v, mask=v < V, other=-float("inf")).to(tl.float32)
        largest, total = _add(largest, total, x)
    top, log_total = _join(largest, total)
    _keep(found_ptr, row, log_total - (at_label - top), at_label == top)
    tl.debug_barrier()  # all threads have read the label's logit
    for start in range(0, V, BLOCK):
        v = start + columns
        x = tl.load(logits_ptr + v, mask=v < V, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(x - top - log_total) - tl.where(v == label, 1.0, 0.0)
        tl.store(logits_ptr + v, gradient.to(logits_ptr.dtype.element_ty), mask=v < V)


@triton.jit
def soft_cross_entropy(logits_ptr, labels_ptr, weights_ptr, found_ptr, stride, V, C, BLOCK: tl.constexpr):
    """Grid (rows). logits: (K, V), any float dtype; labels: (K, C), int64, -1 for all tokens that are no candidate with
    a weight; weights: (K, C), fp32; found: (K, C + 1), fp64."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    labels_ptr += row * C
    weights_ptr += row * C
    found_ptr += row * (C + 1)
    columns = tl.arange(0, BLOCK)
    largest, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        v = start + columns
        x = tl.load(logits_ptr + v, mask=v < V, other=-float("inf")).to(tl.float32)
        largest, total = _add(largest, total, x)
    top, log_total = _join(largest, total)
    first = tl.load(logits_ptr + tl.load(labels_ptr)).to(tl.float32)
    tl.store(found_ptr + C, (first == top).to(tl.float64))
    weight, rest, inside = tl.zeros([], tl.float32), tl.zeros([], tl.float32), tl.zeros([], tl.float32)
    for c in range(C):
        label, own = tl.load(labels_ptr + c), tl.load(weights_ptr + c)
        at_label = tl.load(logits_ptr + tl.maximum(label, 0)).to(tl.float32)
        tl.store(found_ptr + c, (log_total - (at_label - top)).to(tl.float64))
        inside += tl.where((label >= 0) & (own != 0), tl.exp(at_label - top - log_total), 0.0)
        weight += tl.where(label >= 0, own, 0.0)
        rest += tl.where(label < 0, own, 0.0)
    outside = tl.maximum(1.0 - inside, LEAST_OUTSIDE)
    for c in range(C):
        if tl.load(labels_ptr + c) < 0:
            tl.store(found_ptr + c, -tl.log(outside).to(tl.float64))
    tl.debug_barrier()  # all threads have read the labels' logits
    odds = rest * (inside / outside)
    for start in range(0, V, BLOCK):
        v = start + columns
        x = tl.load(logits_ptr + v, mask=v < V, other=-float("inf")).to(tl.float32)
        gradient = (weight - odds) * tl.exp(x - top - log_total)
        for c in range(C):
            own = tl.load(weights_ptr + c)
            probability = tl.exp(-tl.load(found_ptr + c).to(tl.float32))
            own -= tl.where(own != 0, (rest + odds) * probability, 0.0)
            gradient -= tl.where(v == tl.load(labels_ptr + c), own, 0.0)
        tl.store(logits_ptr + v, gradient.to(logits_ptr.dtype.element_ty), mask=v < V)


@triton.jit
def divergence(logits_ptr, teacher_ptr, labels_ptr, found_ptr, stride, teacher_stride, V, BLOCK: tl.constexpr):
    """Grid (rows). As `likelihood`; teacher: (K, V), any float dtype."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    teacher_ptr += row * teacher_stride
    at_label = tl.load(logits_ptr + tl.load(labels_ptr + row)).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    largest, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    taught_largest, taught_total = largest, total
    for start in range(0, V, BLOCK):
        v = start + columns
        x = tl.load(logits_ptr + v, mask=v < V, other=-float("inf")).to(tl.float32)
        taught = tl.load(teacher_ptr + v, mask=v < V, other=-float("inf")).to(tl.float32)
        largest, total = _add(largest, total, x)
        taught_largest, taught_total = _add(taught_largest, taught_total, taught)
    top, log_total = _join(largest, total)
    taught_top, taught_log_total = _join(taught_largest, taught_total)
    tl.debug_barrier()  # all threads have read the label's logit
    losses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        v = start + columns
        x = tl.load(logits_ptr + v, mask=v < V, other=0.0).to(tl.float32) - top - log_total
        taught = tl.load(teacher_ptr + v, mask=v < V, other=0.0).to(tl.float32) - taught_top - taught_log_total
        share = tl.exp(taught)
        losses += tl.where(v < V, share * (taught - x), 0.0)
        tl.store(logits_ptr + v, (tl.exp(x) - share).to(logits_ptr.dtype.element_ty), mask=v < V)
    _keep(found_ptr, row, tl.sum(losses, 0), at_label == top)
