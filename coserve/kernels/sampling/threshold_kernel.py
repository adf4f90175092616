"""Finds where top-k and top-p end in a row of weights: the smallest kept weight, and how many of its ties are kept
(lower ids first).

The threshold is found by bisection over the bits of fp32 weights, which have the same order as the weights. Each loop
over the row tests three pivots, until no two different weights are left between the bounds. Compare FlashInfer's
sorting-free sampling, which redraws instead.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.sampling.constants import GREEDY_BELOW

_GREEDY = tl.constexpr(GREEDY_BELOW)
_UNIT_BITS = tl.constexpr((127 + 34) << 23)


@triton.jit
def _sums(weights_ptr, V, low, high, a, b, c, COUNT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Return the sums (COUNT: the counts) of the weights whose bits are above a, b and c, and the least and greatest
    bits in (low, high]."""
    above_a = tl.zeros([BLOCK], tl.int32 if COUNT else tl.float64)
    above_b = tl.zeros([BLOCK], tl.int32 if COUNT else tl.float64)
    above_c = tl.zeros([BLOCK], tl.int32 if COUNT else tl.float64)
    least = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    most = tl.full([BLOCK], -1, tl.int32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        v = start + tl.arange(0, BLOCK)
        weight = tl.load(weights_ptr + v, mask=v < V, other=-1.0)
        bits = weight.to(tl.int32, bitcast=True)  # the bits of -1 are negative, below every bound
        if COUNT:
            above_a += (bits > a).to(tl.int32)
            above_b += (bits > b).to(tl.int32)
            above_c += (bits > c).to(tl.int32)
        else:
            amount = weight.to(tl.float64)
            above_a += tl.where(bits > a, amount, 0.0)
            above_b += tl.where(bits > b, amount, 0.0)
            above_c += tl.where(bits > c, amount, 0.0)
        least = tl.minimum(least, tl.where(bits > low, bits, 0x7FFFFFFF))
        most = tl.maximum(most, tl.where(bits <= high, bits, -1))
    sums = (tl.sum(above_a, 0).to(tl.float64), tl.sum(above_b, 0).to(tl.float64), tl.sum(above_c, 0).to(tl.float64))
    return sums[0], sums[1], sums[2], tl.min(least, 0), tl.max(most, 0)


@triton.jit
def _search(weights_ptr, V, low, high, goal, COUNT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Return the least bits that occur in (low, high] with less than `goal` above them, and how much is above them: a
    sum of weights, or with COUNT their number.

    At least `goal` is above `low`, and nothing above `high`.
    """
    above = tl.full([], 0.0, tl.float64)
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        a, b, c = low + step, tl.minimum(low + 2 * step, high - 1), tl.minimum(low + 3 * step, high - 1)
        sum_a, sum_b, sum_c, least, most = _sums(weights_ptr, V, low, high, a, b, c, COUNT, BLOCK, STAGES)
        # Nothing occurs between the bounds and the extremes found, so these are bounds too.
        low, high = tl.maximum(low, least - 1), tl.minimum(high, most)
        low = tl.where(sum_a >= goal, tl.maximum(low, a), low)
        low = tl.where(sum_b >= goal, tl.maximum(low, b), low)
        low = tl.where(sum_c >= goal, tl.maximum(low, c), low)
        high = tl.where(sum_c < goal, tl.minimum(high, c), high)
        high = tl.where(sum_b < goal, tl.minimum(high, b), high)
        high = tl.where(sum_a < goal, tl.minimum(high, a), high)
        above = tl.where(sum_c < goal, sum_c, above)
        above = tl.where(sum_b < goal, sum_b, above)
        above = tl.where(sum_a < goal, sum_a, above)
    return high, above


@triton.jit(do_not_specialize_on_alignment=["bounds_ptr"])
def threshold(
    likeliest_ptr,
    columns_ptr,
    weights_ptr,
    masses_ptr,
    bounds_ptr,
    V,
    chunks,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (rows). `bounds` (rows, 2): the bits of the last weight kept, and how many of its ties are kept."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(columns_ptr + row * 5)
    if temperature < _GREEDY or tl.load(likeliest_ptr + row) < 0:
        return
    top_k = tl.load(columns_ptr + row * 5 + 2)
    top_p = tl.load(columns_ptr + row * 5 + 3)
    weights_ptr += row * V
    bits = tl.full([], 0, tl.int32)
    low = tl.full([], -1, tl.int32)
    top = tl.full([], _UNIT_BITS, tl.int32)
    ties = tl.full([], 0.0, tl.float64)
    c = tl.arange(0, CHUNKS)
    total = tl.sum(tl.load(masses_ptr + row * chunks + c, mask=c < chunks, other=0.0), 0)
    if top_k < V:
        bits, above = _search(weights_ptr, V, low, top, top_k, True, BLOCK, STAGES)
        ties = top_k - above
        mass, _, _, _, _ = _sums(weights_ptr, V, bits, bits, bits, bits, bits, False, BLOCK, STAGES)
        total = mass + ties * bits.to(tl.float32, bitcast=True).to(tl.float64)
        low = bits - 1
    if top_p < 1.0:
        goal = tl.maximum(top_p * total, 0.5)
        # All weights below `rest` together are at most 1 - top_p of the total, so the threshold is not below it.
        rest = (total - goal) / V * 0.999
        low = tl.maximum(low, rest.to(tl.float32).to(tl.int32, bitcast=True) - 1)
        last, above = _search(weights_ptr, V, low, top, goal, False, BLOCK, STAGES)
        weight = last.to(tl.float32, bitcast=True).to(tl.float64)
        fit = tl.ceil((goal - above) / weight)
        fit = tl.where(above + (fit - 1.0) * weight >= goal, fit - 1.0, fit)  # corrects a rounded division
        fit = tl.where(above + fit * weight < goal, fit + 1.0, fit)
        ties = tl.where((last == bits) & (top_k < V), tl.minimum(ties, fit), fit)
        bits = last
    tl.store(bounds_ptr + row * 2, bits)
    tl.store(bounds_ptr + row * 2 + 1, ties.to(tl.int32))
