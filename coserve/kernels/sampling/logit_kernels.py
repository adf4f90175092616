"""The kernels of `generate.sampling.draws.penalise_` and `mask_`."""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "slots_ptr", "penalties_ptr"])
def penalise(logits_ptr, rows_ptr, counts_ptr, slots_ptr, penalties_ptr, V, CHUNK: tl.constexpr):
    """Grid (rows, chunks). logits fp32 (B, V), rows and slots (P), penalties fp32 (P, 3): repetition, presence and
    frequency. counts int32 (N, V): twice the token's count in the output, plus 1 if it is in the prompt."""
    at, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, slot = tl.load(rows_ptr + at), tl.load(slots_ptr + at)
    repetition = tl.load(penalties_ptr + at * 3)
    presence = tl.load(penalties_ptr + at * 3 + 1)
    frequency = tl.load(penalties_ptr + at * 3 + 2)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits_ptr + row * V + v, mask=v < V, other=0.0)
    count = tl.load(counts_ptr + slot * V + v, mask=v < V, other=0)
    repeated = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where(count != 0, repeated, logit)
    times = count // 2
    logit = tl.where(times > 0, logit - (frequency * times.to(tl.float32) + presence), logit)
    tl.store(logits_ptr + row * V + v, logit, mask=v < V)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "bits_ptr"])
def mask(logits_ptr, rows_ptr, bits_ptr, V, words, CHUNK: tl.constexpr):
    """Grid (rows, chunks): writes -inf for the tokens of row rows[i] whose bit in bits[i] is 0. logits fp32 (B, V),
    rows (M), bits int32 (M, words): bit v % 32 of word v // 32 belongs to token v."""
    at, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + at)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(bits_ptr + at * words + v // 32, mask=v < V, other=-1)
    forbidden = ((word >> (v % 32)) & 1) == 0
    tl.store(logits_ptr + row * V + v, tl.full([CHUNK], -float("inf"), tl.float32), mask=forbidden & (v < V))
