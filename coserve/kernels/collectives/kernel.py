"""The Triton kernels of `push_sum`. N tensor-parallel ranks."""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202 - a kernel's arguments have the types of its launch

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _wait(flag, count):
    """Waits until another rank has written the block of this count."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while seen - count < 0:  # counts may wrap around
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit
def _tell(flags, flags_of_ranks, rank, place, count):
    """Sets a flag of another rank. All threads must have written their data before."""
    theirs = tl.load(flags_of_ranks + rank).to(flags.dtype)
    tl.atomic_xchg(theirs + place, count, sem="release", scope="sys")


@triton.jit
def _memory_of(own, buffers, rank):
    """The memory of a rank, as `own`."""
    return tl.multiple_of(tl.load(buffers + rank).to(own.dtype), 16)


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
            theirs = _memory_of(own, buffers, rank)
            written = theirs + ((half + place) * block_count + block) * BLOCK + tl.arange(0, BLOCK)
            tl.store(written, values, mask=mask)
    tl.debug_barrier()  # all threads have written before one sets the flag
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            place = RANK - (rank < RANK)
            _tell(flags, flags_of_ranks, rank, place * block_count + block, count)


@triton.jit
def _total(
    x,
    own,
    flags,
    addend,
    at,
    mask,
    places,
    place,
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Waits until the other ranks have written a block, and returns its sum over the ranks, plus `addend` if ADDS.
    `at`: the block's numbers in x; `places`, `place`: blocks that this rank's memory has for each rank, and which of
    them it is."""
    half = (count & 1).to(tl.int64) * (RANKS - 1)
    for other in tl.static_range(RANKS - 1):
        _wait(flags + other * places + place, count)
    tl.debug_barrier()
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in tl.static_range(RANKS):  # in the order of ranks: the same bits everywhere
        if rank == RANK:
            total += tl.load(x + at, mask=mask).to(tl.float32)
        else:
            part = own + ((half + (rank - (rank > RANK))) * places + place) * BLOCK + tl.arange(0, BLOCK)
            total += tl.load(part, mask=mask, cache_modifier=".cg").to(tl.float32)  # bypasses L1, which may be stale
    if ADDS:
        total += tl.load(addend + at, mask=mask).to(tl.float32)
    return total


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
    """Adds up a block that the other ranks write."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < numbers
    total = _total(x, own, flags, addend, at, mask, block_count, block, count, RANK, RANKS, BLOCK, ADDS)
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


@triton.jit
def two_shot_sum(
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
    ADDERS: tl.constexpr,
):
    """Computes `push_sum`; rank `block % N` adds a block up and pushes the sum to the others.

    `own`: (2, N - 1, blocks / N, BLOCK), with a place for each other rank, then the sums (2, blocks, BLOCK). `flags`:
    (N - 1, blocks / N), then (blocks). `counts`: (3, blocks). At least N blocks are used. The programs after PUSHERS
    and ADDERS copy sums."""
    used = tl.cdiv(numbers, BLOCK)
    each = block_count // RANKS
    sums = 2 * (RANKS - 1) * each.to(tl.int64) * BLOCK
    sum_flags = (RANKS - 1) * each
    i = tl.arange(0, BLOCK)
    program = tl.program_id(0)
    if program < PUSHERS:
        for block in range(program, used, PUSHERS):
            owner = block % RANKS
            if owner != RANK:
                count = tl.load(counts + block) + 1
                at = block * BLOCK + i
                place = RANK - (owner < RANK)
                half = (count & 1).to(tl.int64) * (RANKS - 1)
                written = _memory_of(own, buffers, owner) + ((half + place) * each + block // RANKS) * BLOCK + i
                tl.store(written, tl.load(x + at, mask=at < numbers), mask=at < numbers)
                tl.debug_barrier()
                _tell(flags, flags_of_ranks, owner, place * each + block // RANKS, count)
                tl.store(counts + block, count)
    elif program < PUSHERS + ADDERS:
        for index in range(program - PUSHERS, tl.cdiv(used - RANK, RANKS), ADDERS):
            added = index * RANKS + RANK
            number = tl.load(counts + block_count + added) + 1
            where = added * BLOCK + i
            mask = where < numbers
            total = _total(x, own, flags, addend, where, mask, each, index, number, RANK, RANKS, BLOCK, ADDS)
            result = total.to(out.dtype.element_ty)
            tl.store(out + where, result, mask=mask)
            for rank in tl.static_range(RANKS):
                if rank != RANK:
                    sent = _memory_of(own, buffers, rank) + sums + ((number & 1) * block_count + added) * BLOCK + i
                    tl.store(sent, result, mask=mask)
            tl.debug_barrier()
            for rank in tl.static_range(RANKS):
                if rank != RANK:
                    _tell(flags, flags_of_ranks, rank, sum_flags + added, number)
            tl.store(counts + block_count + added, number)
    else:
        copiers = tl.num_programs(0) - PUSHERS - ADDERS
        for index in range(program - PUSHERS - ADDERS, tl.cdiv(used, RANKS) * (RANKS - 1), copiers):
            skipped = index % (RANKS - 1)
            copied = index // (RANKS - 1) * RANKS + skipped + (skipped >= RANK)
            if copied < used:
                awaited = tl.load(counts + 2 * block_count + copied) + 1
                _wait(flags + sum_flags + copied, awaited)
                tl.debug_barrier()
                to = copied * BLOCK + i
                given = own + sums + ((awaited & 1) * block_count + copied) * BLOCK + i
                tl.store(out + to, tl.load(given, mask=to < numbers, cache_modifier=".cg"), mask=to < numbers)
                tl.store(counts + 2 * block_count + copied, awaited)
