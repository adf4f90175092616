"""The kernels of experts' LoRA terms in serving: x Aᵀ, and its product with B, added in place.

The rows of a call are sorted by expert and slot. There is a program for each row. If a tile begins at its row, it
computes up to 16 consecutive rows of one expert and slot; otherwise it exits at once. So one launch serves any number
of adapters and experts, its size depends only on the number of rows, and each used pair is read once per 16 rows.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _same(slots_ptr, tokens_ptr, experts_ptr, s, slot, expert, keep):
    """Whether each row `s` (where `keep`) belongs to this slot and expert."""
    token = tl.load(tokens_ptr + s, mask=keep, other=0)
    same = tl.load(slots_ptr + token, mask=keep, other=-1) == slot
    return keep & same & (tl.load(experts_ptr + s, mask=keep, other=-1) == expert)


@triton.jit
def _begins(slots_ptr, tokens_ptr, experts_ptr, first, slot, expert, E, BLOCK_S: tl.constexpr):
    """Whether a tile begins at row `first`: the previous row belongs to another tile, and it is of one of E experts."""
    inner = (first % BLOCK_S) != 0
    return (slot >= 0) & (expert < E) & ~_same(slots_ptr, tokens_ptr, experts_ptr, first - 1, slot, expert, inner)


@triton.jit
def _rows(slots_ptr, tokens_ptr, experts_ptr, S, first, slot, expert, BLOCK_S: tl.constexpr):
    """Return the rows of the tile that begins at `first`, and which of them are of its expert and slot."""
    s = first + tl.arange(0, BLOCK_S)
    inside = (s < S) & (s < (first // BLOCK_S + 1) * BLOCK_S)
    return s, _same(slots_ptr, tokens_ptr, experts_ptr, s, slot, expert, inside)


@triton.jit(do_not_specialize=["S", "E"])
def shrink(
    x_ptr,
    h_ptr,
    slots_ptr,
    tokens_ptr,
    experts_ptr,
    table_ptr,
    ranks_ptr,
    scales_ptr,
    S,
    E,
    D,
    stride,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
):
    """`h = scaling x Aᵀ` (S, R) in fp32. Grid (rows). x (S, D): rows `stride` apart; slots (tokens); tokens, experts
    (S), E for rows without terms; `table_ptr`: int64 (slots, 2), addresses of a site's A (E R, D) and B; 0: the adapter
    does not change it."""
    first = tl.program_id(0)
    slot, expert = tl.load(slots_ptr + tl.load(tokens_ptr + first)), tl.load(experts_ptr + first)
    if _begins(slots_ptr, tokens_ptr, experts_ptr, first, slot, expert, E, BLOCK_S):
        address = tl.load(table_ptr + slot * 2)
        if address != 0:
            rank = tl.load(ranks_ptr + slot)
            s, keep = _rows(slots_ptr, tokens_ptr, experts_ptr, S, first, slot, expert, BLOCK_S)
            r, d = tl.arange(0, R), tl.arange(0, BLOCK_D)
            a_ptr = address.to(tl.pointer_type(x_ptr.dtype.element_ty)) + expert.to(tl.int64) * rank * D
            total = tl.zeros((BLOCK_S, R), dtype=tl.float32)
            for at in range(0, D, BLOCK_D):
                inside = (at + d) < D
                x = tl.load(
                    x_ptr + s.to(tl.int64)[:, None] * stride + at + d[None, :],
                    mask=keep[:, None] & inside[None, :],
                    other=0.0,
                )
                a = tl.load(
                    a_ptr + r[None, :] * D + at + d[:, None], mask=(r < rank)[None, :] & inside[:, None], other=0.0
                )
                total += tl.dot(x, a, input_precision="ieee")
            total = total * tl.load(scales_ptr + slot)
            tl.store(h_ptr + s.to(tl.int64)[:, None] * R + r[None, :], total, mask=keep[:, None])


@triton.jit(do_not_specialize=["S", "E"])
def expand(
    h_ptr,
    y_ptr,
    slots_ptr,
    tokens_ptr,
    experts_ptr,
    table_ptr,
    ranks_ptr,
    S,
    E,
    O,
    stride,
    BLOCK_S: tl.constexpr,
    BLOCK_O: tl.constexpr,
    R: tl.constexpr,
):
    """`y += h Bᵀ` in place. Grid (rows, output blocks). y (S, O): rows `stride` apart; rows of B (E O, rank) are padded
    to a multiple of 8. The rest as in `shrink`."""
    first = tl.program_id(0)
    slot, expert = tl.load(slots_ptr + tl.load(tokens_ptr + first)), tl.load(experts_ptr + first)
    if _begins(slots_ptr, tokens_ptr, experts_ptr, first, slot, expert, E, BLOCK_S):
        address = tl.load(table_ptr + slot * 2 + 1)
        if address != 0:
            rank = tl.load(ranks_ptr + slot)
            width = (rank + 7) // 8 * 8
            s, keep = _rows(slots_ptr, tokens_ptr, experts_ptr, S, first, slot, expert, BLOCK_S)
            r, o = tl.arange(0, R), tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
            b_ptr = address.to(tl.pointer_type(y_ptr.dtype.element_ty)) + (expert.to(tl.int64) * O) * width
            b = tl.load(
                b_ptr + o[None, :].to(tl.int64) * width + r[:, None],
                mask=(r < rank)[:, None] & (o < O)[None, :],
                other=0.0,
            )
            h = tl.load(
                h_ptr + s.to(tl.int64)[:, None] * R + r[None, :], mask=keep[:, None] & (r < rank)[None, :], other=0.0
            )
            delta = tl.dot(h.to(b.dtype), b, input_precision="ieee")
            at = y_ptr + s.to(tl.int64)[:, None] * stride + o[None, :]
            inside = keep[:, None] & (o < O)[None, :]
            y = tl.load(at, mask=inside, other=0.0).to(tl.float32) + delta
            tl.store(at, y.to(y_ptr.dtype.element_ty), mask=inside)
