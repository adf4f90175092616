"""Argmax of each row, the lowest id among equals: `peak` for each chunk of a row, `top` for the row."""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def peak(logits_ptr, stride, peaks_ptr, V, CHUNK: tl.constexpr):
    """Grid (rows, chunks). A logit and its token as one number: the bits of the logit, in its order, then V less the
    id."""
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
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    least = tl.full([CHUNKS], -0x8000000000000000, tl.int64)
    best = tl.max(tl.load(peaks_ptr + row * chunks + c, mask=c < chunks, other=least), 0)
    bits = (best >> 32).to(tl.int32)
    finite = (bits < 0x7F800000) & (bits > -0x7F800001)  # bits of minus infinity in this order
    tl.store(tokens_ptr + row, tl.where(finite, 0x7FFFFFFF - (best & 0x7FFFFFFF), -1))
