"""Sorts the rows of a mixture of experts, and counts them, in one launch: for the few rows of a decode step.

A row's place is the number of rows before it, which a program counts for a block of rows by comparing them with all
others. So the order is stable and the same in each run, and nothing is exchanged between programs.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _key(chosen_ptr, slots_ptr, i, S, K, slots, SLOTS: tl.constexpr):
    """Return the experts and the sort keys of rows `i`; rows from S on have the largest key."""
    expert = tl.load(chosen_ptr + i, mask=i < S, other=2147483647).to(tl.int32)
    key = expert
    if SLOTS:
        slot = tl.load(slots_ptr + i // K, mask=i < S, other=0).to(tl.int32)
        key = tl.where(i < S, expert * (slots + 1) + slot, 2147483647)
    return expert, key


@triton.jit(do_not_specialize=["S", "K", "E", "slots"], do_not_specialize_on_alignment=["slots_ptr"])
def order_rows(
    chosen_ptr,
    slots_ptr,
    place_ptr,
    expert_ptr,
    token_ptr,
    ends_ptr,
    S,
    K,
    E,
    slots,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (blocks of rows, then blocks of experts). chosen int64 (S): the expert of each of K choices of a token;
    slots int32 (tokens), from -1 to `slots` - 1, read if `SLOTS`. Writes int64 (S): the row
    of each choice, and expert and token of each row, sorted by expert and slot; int32 (E): the index one past each
    expert's last row."""
    block, blocks = tl.program_id(0), tl.cdiv(S, BLOCK)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    if block < blocks:
        i = block * BLOCK + tl.arange(0, BLOCK)
        expert, key = _key(chosen_ptr, slots_ptr, i, S, K, slots, SLOTS)
        for first in range(0, S, CHUNK):
            j = first + tl.arange(0, CHUNK)
            _, other = _key(chosen_ptr, slots_ptr, j, S, K, slots, SLOTS)
            equal = (other[None, :] == key[:, None]) & (j[None, :] < i[:, None])
            count += tl.sum(((other[None, :] < key[:, None]) | equal).to(tl.int32), 1)
        tl.store(place_ptr + i, count.to(tl.int64), mask=i < S)
        tl.store(expert_ptr + count, expert.to(tl.int64), mask=i < S)
        tl.store(token_ptr + count, (i // K).to(tl.int64), mask=i < S)
    else:
        e = (block - blocks) * BLOCK + tl.arange(0, BLOCK)
        for first in range(0, S, CHUNK):
            j = first + tl.arange(0, CHUNK)
            other, _ = _key(chosen_ptr, slots_ptr, j, S, K, slots, SLOTS)
            count += tl.sum((other[None, :] <= e[:, None]).to(tl.int32), 1)
        tl.store(ends_ptr + e, count, mask=e < E)
