"""The Triton kernel of `push_sum`. N tensor-parallel ranks."""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _push(
    x,
    own,
    buffers,
    flags,
    flags_of_ranks,
    numbers,
    block_count,
    block,
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes a block of x into the other ranks' memory, then `count` into their flags."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < numbers
    values = tl.load(x + at, mask=mask)
    half = (count & 1).to(tl.int64) * (RANKS - 1)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            place = RANK - (rank < RANK)
            theirs = tl.multiple_of(tl.load(buffers + rank).to(own.dtype), 16)
            written = theirs + ((half + place) * block_count + block) * BLOCK + tl.arange(0, BLOCK)
            tl.store(written, values, mask=mask)
    tl.debug_barrier()  # all threads have written before one sets the flag
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            place = RANK - (rank < RANK)
            theirs = tl.load(flags_of_ranks + rank).to(flags.dtype)
            tl.atomic_xchg(theirs + place * block_count + block, count, sem="release", scope="sys")


@triton.jit
def _add_up(
    x,
    out,
    own,
    flags,
    addend,
    numbers,
    block_count,
    block,
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Waits until the other ranks have written a block, then adds it up."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < numbers
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
            part = own + ((half + (rank - (rank > RANK))) * block_count + block) * BLOCK + tl.arange(0, BLOCK)
            total += tl.load(part, mask=mask, cache_modifier=".cg").to(tl.float32)  # bypasses L1, which may be stale
    if ADDS:
        total += tl.load(addend + at, mask=mask).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


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
    PUSHERS: tl.constexpr,
):
    """Sums x over the ranks into `out`, plus `addend` if ADDS (shaped as x, the same on all ranks). `own` (2, N - 1,
    blocks, BLOCK) and `flags` (N - 1, blocks): this rank's memory, with a place for each other rank. `buffers`,
    `flags_of_ranks` (N): addresses of every rank's `own` and `flags`. `counts`: (2, blocks). PUSHERS = 0: each program
    pushes its blocks, then adds them up. PUSHERS > 0: that many programs only push, while the others only add up."""
    used = tl.cdiv(numbers, BLOCK)
    if PUSHERS == 0:
        for block in range(tl.program_id(0), used, tl.num_programs(0)):
            count = tl.load(counts + block) + 1
            _push(x, own, buffers, flags, flags_of_ranks, numbers, block_count, block, count, RANK, RANKS, BLOCK)
        for block in range(tl.program_id(0), used, tl.num_programs(0)):
            count = tl.load(counts + block) + 1
            _add_up(x, out, own, flags, addend, numbers, block_count, block, count, RANK, RANKS, BLOCK, ADDS)
            tl.store(counts + block, count)
    elif tl.program_id(0) < PUSHERS:
        for block in range(tl.program_id(0), used, PUSHERS):
            count = tl.load(counts + block) + 1
            _push(x, own, buffers, flags, flags_of_ranks, numbers, block_count, block, count, RANK, RANKS, BLOCK)
            tl.store(counts + block, count)
    else:
        added = counts + block_count
        for block in range(tl.program_id(0) - PUSHERS, used, tl.num_programs(0) - PUSHERS):
            count = tl.load(added + block) + 1
            _add_up(x, out, own, flags, addend, numbers, block_count, block, count, RANK, RANKS, BLOCK, ADDS)
            tl.store(added + block, count)
