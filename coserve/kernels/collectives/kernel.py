"""The kernel of `push_sum`. N ranks."""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def push_sum(
    x,
    out,
    own,
    buffers,
    flags,
    flags_of_ranks,
    counts,
    addend,
    numbers,
    block_count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    """`addend`: as x, the same on all ranks; read if ADDS. `own`, `flags`: of this rank, (2, N - 1, blocks, BLOCK) and (N - 1, blocks), with a place for each other rank; `buffers`, `flags_of_ranks`: addresses
    of all ranks' (N). `counts`: (blocks). A program has every so many blocks."""
    within = tl.arange(0, BLOCK)
    used = tl.cdiv(numbers, BLOCK)
    for block in range(tl.program_id(0), used, tl.num_programs(0)):
        at = block * BLOCK + within
        mask = at < numbers
        values = tl.load(x + at, mask=mask)
        count = tl.load(counts + block) + 1
        half = (count & 1).to(tl.int64) * (RANKS - 1)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                place = RANK - (rank < RANK)
                theirs = tl.multiple_of(tl.load(buffers + rank).to(own.dtype), 16)
                tl.store(theirs + ((half + place) * block_count + block) * BLOCK + within, values, mask=mask)
        tl.debug_barrier()  # every thread has written before one of them tells
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                place = RANK - (rank < RANK)
                theirs = tl.load(flags_of_ranks + rank).to(flags.dtype)
                tl.atomic_xchg(theirs + place * block_count + block, count, sem="release", scope="sys")
    for block in range(tl.program_id(0), used, tl.num_programs(0)):
        at = block * BLOCK + within
        mask = at < numbers
        count = tl.load(counts + block) + 1
        half = (count & 1).to(tl.int64) * (RANKS - 1)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                flag = flags + (rank - (rank > RANK)) * block_count + block
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                while seen - count < 0:  # counts may wrap around
                    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        tl.debug_barrier()
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for rank in tl.static_range(RANKS):  # in the order of ranks: the same bits everywhere
            if rank == RANK:
                total += tl.load(x + at, mask=mask).to(tl.float32)
            else:
                part = own + ((half + (rank - (rank > RANK))) * block_count + block) * BLOCK + within
                total += tl.load(part, mask=mask, cache_modifier=".cg").to(tl.float32)  # not what L1 may still have
        if ADDS:
            total += tl.load(addend + at, mask=mask).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
        tl.store(counts + block, count)
