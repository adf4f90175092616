"""How the segmented kernels read adapter weights through the slot table."""

# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weights(addresses_ptr, entry, which, like_ptr):
    """Pointer to a_RD (`which` 0) or b_OR (1) of a (slot, site) entry, typed as `like_ptr`; 16-byte aligned."""
    address = tl.load(addresses_ptr + entry * 2 + which)
    return tl.multiple_of(address.to(like_ptr.dtype), 16)


@triton.jit
def load_b(b_ptr, o, r, O, rank):
    """b_OR[o, r] as a (len(o), len(r)) tile, zero outside; its rows are padded to 16 bytes (`tables.readable`)."""
    stride = (rank + 7) // 8 * 8
    return tl.load(b_ptr + o[:, None] * stride + r[None, :], mask=(o < O)[:, None] & (r < stride)[None, :], other=0.0)


@triton.jit
def padded(rank):
    """How many ranks of h and g are written, with zeros at their end: whole vectors, whatever the rank."""
    return (rank + 15) // 16 * 16


@triton.jit
def ask_for(line_ptr):
    """Has the 128 bytes behind each 16-byte aligned pointer fetched into the L2; returns at once, holds no registers."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 128; mov.b32 $0, 0;",
        "=r,l",
        [line_ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
