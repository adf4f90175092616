"""The kernel of `generate.sampling.draws.mask_`."""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "bits_ptr"])
def mask(logits_ptr, rows_ptr, bits_ptr, V, words, CHUNK: tl.constexpr):
    """Grid (rows, chunks)."""
    at, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + at)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(bits_ptr + at * words + v // 32, mask=v < V, other=-1)
    forbidden = ((word >> (v % 32)) & 1) == 0
    tl.store(logits_ptr + row * V + v, tl.full([CHUNK], -float("inf"), tl.float32), mask=forbidden & (v < V))
