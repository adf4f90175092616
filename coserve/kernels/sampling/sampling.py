"""Drawing tokens without sorting: a row of weights is read a few times, and nothing is written but the token.

    peak, top  the first token of the highest logit, by chunk and of the row
    weigh      w[b, v] = round(UNIT exp((logit - highest) / temperature)), 0 below min-p; their sum over each chunk
    threshold  the weight and the number of its ties (lower ids first) at which top-k and top-p end
    sift       each chunk's sum of weights above the threshold, and its ties
    settle     the first token, in order of ids, whose running sum of kept weights is above a uniform share of all
    penalise   the penalties of `generate.sampling.draws.penalise_`

The weights are whole numbers whose sums are exact in fp64 (`generate.sampling.draws`), so the order of additions does not matter.
A threshold is searched for by bisection of the bits of fp32 weights, which are in the order of the weights (compare
FlashInfer's sorting-free sampling, which draws again where this searches): three pivots a pass, until no two different
weights are left between the bounds.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coserve.kernels.gpu.device import interpreted
from coserve.kernels.gpu.rounding import cdiv, next_power_of_2

GREEDY_BELOW = 1e-5
"""A temperature below this means the likeliest token."""
NOT_FINITE = -1
"""In place of a token: the logits were not finite."""
NONE_LEFT = -2
"""In place of a token: logit bias, penalties and barred tokens left no token to choose."""
UNIT = 2.0**34
"""The largest weight: sums over up to 2^19 tokens are exact in fp64."""
CHUNK = 512
"""Tokens of a program that shares a row with others."""
PEAK_CHUNK = 1024
"""Tokens of a program of `peak`."""
COLUMNS = 5

_GREEDY = tl.constexpr(GREEDY_BELOW)
_UNIT = tl.constexpr(UNIT)
_UNIT_BITS = tl.constexpr((127 + 34) << 23)


@triton.jit
def peak(logits_ptr, stride, peaks_ptr, V, CHUNK: tl.constexpr):
    """Grid (rows, chunks). A logit and its token as one number: the bits of the logit, in its order, then V less the id."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * stride + v, mask=v < V, other=-float("inf")).to(tl.float32)
    logits = tl.where(logits == 0, 0.0, logits)  # no negative zeros
    bits = logits.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F800000, bits)  # not a number: as infinity
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    best = tl.max((ordered << 32) | (0x7FFFFFFF - v).to(tl.int64), 0)
    tl.store(peaks_ptr + row * tl.num_programs(1) + chunk, best)


@triton.jit
def top(peaks_ptr, tokens_ptr, chunks, CHUNKS: tl.constexpr):
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    least = tl.full([CHUNKS], -0x8000000000000000, tl.int64)
    best = tl.max(tl.load(peaks_ptr + row * chunks + c, mask=c < chunks, other=least), 0)
    bits = (best >> 32).to(tl.int32)
    finite = (bits < 0x7F800000) & (bits > -0x7F800001)  # of minus infinity, in this order
    tl.store(tokens_ptr + row, tl.where(finite, 0x7FFFFFFF - (best & 0x7FFFFFFF), -1))


@triton.jit
def weigh(logits_ptr, stride, likeliest_ptr, columns_ptr, weights_ptr, masses_ptr, V, CHUNK: tl.constexpr):
    """Grid (rows, chunks)."""
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


@triton.jit
def _sums(weights_ptr, V, low, high, a, b, c, COUNT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Sums (counts) of the weights whose bits are above a, b and c, and the least and greatest bits in (low, high]."""
    above_a = tl.zeros([BLOCK], tl.int32 if COUNT else tl.float64)
    above_b = tl.zeros([BLOCK], tl.int32 if COUNT else tl.float64)
    above_c = tl.zeros([BLOCK], tl.int32 if COUNT else tl.float64)
    least = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    most = tl.full([BLOCK], -1, tl.int32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        v = start + tl.arange(0, BLOCK)
        weight = tl.load(weights_ptr + v, mask=v < V, other=-1.0)
        bits = weight.to(tl.int32, bitcast=True)  # of -1: negative, below every bound
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
    """The least bits that occur in (low, high] and have less than `goal` above them; and what is above them.

    There is at least `goal` above `low`, and nothing above `high`.
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
    likeliest_ptr, columns_ptr, weights_ptr, masses_ptr, bounds_ptr, V, chunks,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
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
        # Weights below that are no more than 1 - top_p of all together: enough lies above.
        rest = (total - goal) / V * 0.999
        low = tl.maximum(low, rest.to(tl.float32).to(tl.int32, bitcast=True) - 1)
        last, above = _search(weights_ptr, V, low, top, goal, False, BLOCK, STAGES)
        weight = last.to(tl.float32, bitcast=True).to(tl.float64)
        fit = tl.ceil((goal - above) / weight)
        fit = tl.where(above + (fit - 1.0) * weight >= goal, fit - 1.0, fit)  # should the division have been rounded
        fit = tl.where(above + fit * weight < goal, fit + 1.0, fit)
        ties = tl.where((last == bits) & (top_k < V), tl.minimum(ties, fit), fit)
        bits = last
    tl.store(bounds_ptr + row * 2, bits)
    tl.store(bounds_ptr + row * 2 + 1, ties.to(tl.int32))


@triton.jit(do_not_specialize_on_alignment=["ties_ptr", "bounds_ptr"])
def sift(likeliest_ptr, columns_ptr, weights_ptr, masses_ptr, ties_ptr, bounds_ptr, V, CHUNK: tl.constexpr):
    """Grid (rows, chunks)."""
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
    likeliest_ptr, columns_ptr, weights_ptr, masses_ptr, ties_ptr, bounds_ptr, tokens_ptr, V, chunks,
    FILTERS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Grid (rows)."""
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


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "slots_ptr", "penalties_ptr"])
def penalise(logits_ptr, rows_ptr, said_ptr, slots_ptr, penalties_ptr, V, CHUNK: tl.constexpr):
    """Grid (rows, chunks)."""
    at, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, slot = tl.load(rows_ptr + at), tl.load(slots_ptr + at)
    repetition = tl.load(penalties_ptr + at * 3)
    presence = tl.load(penalties_ptr + at * 3 + 1)
    frequency = tl.load(penalties_ptr + at * 3 + 2)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits_ptr + row * V + v, mask=v < V, other=0.0)
    said = tl.load(said_ptr + slot * V + v, mask=v < V, other=0)
    repeated = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where(said != 0, repeated, logit)
    times = said // 2
    logit = tl.where(times > 0, logit - (frequency * times.to(tl.float32) + presence), logit)
    tl.store(logits_ptr + row * V + v, logit, mask=v < V)


THRESHOLD = {"BLOCK": 4096, "STAGES": 1, "num_warps": 32}
"""Of a program that reads a whole row again and again."""


def likeliest(logits_BV: Tensor) -> Tensor:
    """See `generate.sampling.draws.likeliest`. Rows of the logits may lie apart."""
    rows, vocab = logits_BV.shape
    assert logits_BV.stride(1) == 1, "expected the logits of a row side by side"
    chunks, tokens = cdiv(vocab, PEAK_CHUNK), torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    if rows:
        peaks = torch.empty(rows, chunks, dtype=torch.int64, device=logits_BV.device)
        peak[(rows, chunks)](logits_BV, logits_BV.stride(0), peaks, vocab, CHUNK=PEAK_CHUNK, num_warps=4)
        top[(rows,)](peaks, tokens, chunks, CHUNKS=next_power_of_2(chunks), num_warps=4)
    return tokens


def draw(logits_BV: Tensor, likeliest_B: Tensor, columns_BK: Tensor, *, filters: bool) -> Tensor:
    """See `generate.sampling.draws.draw`. Rows of the logits may lie apart."""
    rows, vocab = logits_BV.shape
    assert columns_BK.shape == (rows, COLUMNS), f"expected {COLUMNS} columns, got {tuple(columns_BK.shape)}"
    assert logits_BV.stride(1) == 1, "expected the logits of a row side by side"
    device, chunks = logits_BV.device, cdiv(vocab, CHUNK)
    weights = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    masses = torch.empty(rows, chunks, dtype=torch.float64, device=device)
    counts = torch.empty(rows, chunks + 2, dtype=torch.int32, device=device)
    ties, bounds = counts.flatten()[: rows * chunks], counts.flatten()[rows * chunks :]
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    padded = next_power_of_2(chunks)
    common = (likeliest_B, columns_BK, weights, masses)
    weigh[(rows, chunks)](
        logits_BV, logits_BV.stride(0), likeliest_B, columns_BK, weights, masses, vocab, CHUNK=CHUNK, num_warps=4
    )
    if filters:
        threshold[(rows,)](*common, bounds, vocab, chunks, CHUNKS=padded, **THRESHOLD)
        sift[(rows, chunks)](*common, ties, bounds, vocab, CHUNK=CHUNK, num_warps=4)
    settle[(rows,)](
        *common, ties, bounds, tokens, vocab, chunks, FILTERS=filters, CHUNK=CHUNK, CHUNKS=padded, num_warps=8
    )
    return tokens


def penalise_(logits_BV: Tensor, rows_P: Tensor, said_NV: Tensor, slots_P: Tensor, penalties_PK: Tensor) -> None:
    """See `generate.sampling.draws.penalise_`: in place on some rows of fp32 logits, with rows `slots_P` of the table `said_NV`."""
    assert logits_BV.is_contiguous() and said_NV.is_contiguous(), "expected whole rows"
    vocab = logits_BV.shape[1]
    grid = (len(rows_P), cdiv(vocab, CHUNK))
    exact = {} if interpreted() else {"enable_fp_fusion": False}  # to the last bit what PyTorch's operations give
    penalise[grid](logits_BV, rows_P, said_NV, slots_P, penalties_PK, vocab, CHUNK=CHUNK, num_warps=4, **exact)
