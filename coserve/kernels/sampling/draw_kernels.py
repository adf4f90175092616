"""Draws a token without sorting: a row of weights is read a few times, and only the token is written.

    weigh   w[b, v] = round(UNIT exp((logit - highest) / temperature)), 0 below min-p; their sum over each chunk
    sift    each chunk's sum of weights above the threshold (`threshold_kernel`), and its ties
    settle  the first token, in order of ids, whose running sum of kept weights exceeds a uniform fraction of the total

The weights are integers whose sums are exact in fp64 (`generate.sampling.draws`), so the order of additions does not
matter. Argmax of each row, the lowest id among equals, is `peak` for each chunk of a row, then `top` for the row.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

from coserve.kernels.sampling.constants import GREEDY_BELOW, UNIT

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch


_GREEDY = tl.constexpr(GREEDY_BELOW)
_UNIT = tl.constexpr(UNIT)


@triton.jit
def weigh(logits_ptr, stride, likeliest_ptr, columns_ptr, weights_ptr, masses_ptr, V, CHUNK: tl.constexpr):
    """Grid (rows, chunks). logits (B, V); likeliest int64 (B); columns fp64 (B, COLUMNS) -> weights fp32 (B, V), masses
    (sums per chunk) fp64 (B, chunks). Here and below, greedy rows and rows without a valid token are left out."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(columns_ptr + row * 5)
    token = tl.load(likeliest_ptr + row)
    if temperature < _GREEDY or token < 0:
        return
    min_p = tl.load(columns_ptr + row * 5 + 1)
    highest = tl.load(logits_ptr + row * stride + token).to(tl.float64)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * stride + v, mask=v < V, other=-float("inf")).to(tl.float64)
    shares = tl.exp((logits - highest) * (1.0 / temperature))
    shares = tl.where(shares < min_p, 0.0, shares)
    whole = (shares * _UNIT + 0.5).to(tl.int64).to(tl.float32)
    tl.store(weights_ptr + row * V + v, whole, mask=v < V)
    tl.store(masses_ptr + row * tl.num_programs(1) + chunk, tl.sum(whole.to(tl.float64), 0))


@triton.jit(do_not_specialize_on_alignment=["ties_ptr", "bounds_ptr"])
def sift(likeliest_ptr, columns_ptr, weights_ptr, masses_ptr, ties_ptr, bounds_ptr, V, CHUNK: tl.constexpr):
    """Grid (rows, chunks). bounds int32 (B, 2), see `threshold` -> masses fp64 (B, chunks), without ties; ties int32
    (B, chunks): how many weights equal the threshold."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(columns_ptr + row * 5) < _GREEDY or tl.load(likeliest_ptr + row) < 0:
        return
    last = tl.load(bounds_ptr + row * 2)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    weight = tl.load(weights_ptr + row * V + v, mask=v < V, other=-1.0)
    bits = weight.to(tl.int32, bitcast=True)
    at = row * tl.num_programs(1) + chunk
    tl.store(masses_ptr + at, tl.sum(tl.where(bits > last, weight.to(tl.float64), 0.0), 0))
    tl.store(ties_ptr + at, tl.sum((bits == last).to(tl.int32), 0))


@triton.jit(do_not_specialize_on_alignment=["ties_ptr", "bounds_ptr"])
def settle(
    likeliest_ptr,
    columns_ptr,
    weights_ptr,
    masses_ptr,
    ties_ptr,
    bounds_ptr,
    tokens_ptr,
    V,
    chunks,
    FILTERS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (rows): tokens int64 (B); a greedy row gets its likeliest token. FILTERS: some row has a top-k or top-p."""
    row = tl.program_id(0).to(tl.int64)
    likeliest = tl.load(likeliest_ptr + row)
    if tl.load(columns_ptr + row * 5) < _GREEDY or likeliest < 0:
        tl.store(tokens_ptr + row, likeliest)
        return
    number = tl.load(columns_ptr + row * 5 + 4)
    c = tl.arange(0, CHUNKS)
    mass = tl.load(masses_ptr + row * chunks + c, mask=c < chunks, other=0.0)
    last = tl.full([], 0, tl.int32)
    kept = tl.zeros([CHUNKS], tl.int32)
    if FILTERS:
        last = tl.load(bounds_ptr + row * 2)
        quota = tl.load(bounds_ptr + row * 2 + 1)
        ties = tl.load(ties_ptr + row * chunks + c, mask=c < chunks, other=0)
        kept = tl.minimum(tl.maximum(quota - (tl.cumsum(ties, 0) - ties), 0), ties)
        mass += kept.to(tl.float64) * last.to(tl.float32, bitcast=True).to(tl.float64)
    total = tl.sum(mass, 0)
    goal = tl.minimum(tl.floor(number * total), total - 1.0)
    chunk = tl.minimum(tl.sum((tl.cumsum(mass, 0) <= goal).to(tl.int32), 0), chunks - 1)
    goal -= tl.sum(tl.where(c < chunk, mass, 0.0), 0)
    within = tl.sum(tl.where(c == chunk, kept, 0), 0)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    weight = tl.load(weights_ptr + row * V + v, mask=v < V, other=0.0)
    if FILTERS:
        bits = weight.to(tl.int32, bitcast=True)
        tie = ((bits == last) & (v < V)).to(tl.int32)
        weight = tl.where((bits > last) | ((tie > 0) & (tl.cumsum(tie, 0) <= within)), weight, 0.0)
    place = tl.sum((tl.cumsum(weight.to(tl.float64), 0) <= goal).to(tl.int32), 0)
    tl.store(tokens_ptr + row, (chunk * CHUNK + tl.minimum(place, CHUNK - 1)).to(tl.int64))


@triton.jit
def peak(logits_ptr, stride, peaks_ptr, V, CHUNK: tl.constexpr):
    """Grid (rows, chunks). Packs a logit and its token into one int64, so that the maximum is the largest logit with
    the lowest id: the logit's bits, order-preserving, above 2^31 - 1 - id."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * stride + v, mask=v < V, other=-float("inf")).to(tl.float32)
    logits = tl.where(logits == 0, 0.0, logits)  # no negative zeros
    bits = logits.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F800000, bits)  # NaN counts as infinity
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    best = tl.max((ordered << 32) | (0x7FFFFFFF - v).to(tl.int64), 0)
    tl.store(peaks_ptr + row * tl.num_programs(1) + chunk, best)


@triton.jit
def top(peaks_ptr, tokens_ptr, chunks, CHUNKS: tl.constexpr):
    """Grid (rows): peaks int64 (B, chunks) -> tokens int64 (B), `NOT_FINITE` if the largest logit is not finite."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    least = tl.full([CHUNKS], -0x8000000000000000, tl.int64)
    best = tl.max(tl.load(peaks_ptr + row * chunks + c, mask=c < chunks, other=least), 0)
    bits = (best >> 32).to(tl.int32)
    finite = (bits < 0x7F800000) & (bits > -0x7F800001)  # bits of minus infinity in this order
    tl.store(tokens_ptr + row, tl.where(finite, 0x7FFFFFFF - (best & 0x7FFFFFFF), -1))
