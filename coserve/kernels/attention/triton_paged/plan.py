"""Plans the fused attention kernels on the host: items of similar size for decode, tiles for prompt chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coserve.kernels.attention.interface import TokenRun, Window

Ints = NDArray[np.int64]
Table = NDArray[np.int32]

Placed = tuple[int, int, TokenRun]
"""Column of the page table, first row of q, run."""

BEYOND = 128
"""Programs per grid for cutting long sequences, in addition to one per sequence. Idle ones start anyway, which costs
time."""
CHUNK_STEP, CHUNK_LEAST = 128, 512
"""Step and minimum, in keys, of the items of a prompt chunk."""
PIECES = 40
"""Most items of the longest sequence, unless a wave has more."""
START, JOIN, JOINED = 128, 128, 4
"""Costs of starting an item, of a join, and of each item joined, in units of the time that an item takes per key."""


def programs_each(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Return the number of decode programs to run concurrently on a multiprocessor, for `rows` sequences.

    Fewer programs have more memory and larger steps each, but all sequences should run at once.
    """
    return next((each for each in (1, 2, 3) if rows * kv_heads <= each * multiprocessors), 4)


def _wave(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Number of items that run at once."""
    return max(1, programs_each(rows, kv_heads, multiprocessors) * multiprocessors // kv_heads)


def _step(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Granularity of items, in keys."""
    return 128 if programs_each(rows, kv_heads, multiprocessors) == 1 else 64


def items_for(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Most items that `decode_items` makes for `rows` sequences; a graph's grid must have as many."""
    return max(_wave(rows, kv_heads, multiprocessors), rows + BEYOND // kv_heads)


def decode_items(
    contexts: Ints, rows: Ints, window: Window | None, most: int, kv_heads: int, multiprocessors: int
) -> Table:
    """Cut each sequence's context into items (W, 8), W <= `most`, as input of the decode kernel.

    `contexts` (N): tokens of each sequence including the new one, 0 for a padding row. `rows` (N): the sequence's row
    of q; its column of the page table is its index here.
    """
    begins = np.zeros_like(contexts) if window is None else window.first(np.maximum(contexts - 1, 0))
    spans = contexts - begins
    step = _step(len(contexts), kv_heads, multiprocessors)
    piece = _piece(spans, most, _wave(len(contexts), kv_heads, multiprocessors), step)
    # Each sequence gets as many items as its keys need at that size; its items are then made equal.
    sizes = np.maximum(_ceil(_ceil(spans, np.maximum(_ceil(spans, piece), 1)), step) * step, step)
    counts = np.maximum(_ceil(spans, sizes), 1)
    firsts = counts.cumsum() - counts
    of = np.repeat(np.arange(len(contexts)), counts)
    index = np.arange(len(of)) - firsts[of]
    items = np.zeros((len(of), 8), dtype=np.int32)
    items[:, 0], items[:, 1] = of, rows[of]
    items[:, 2] = begins[of] + index * sizes[of]
    items[:, 3] = np.minimum(items[:, 2] + sizes[of], contexts[of])
    items[:, 4], items[:, 5] = firsts[of], np.where(contexts > 0, counts, 0)[of]
    items[:, 6] = index == counts[of] - 1
    return items


def _piece(spans: Ints, most: int, wave: int, step: int) -> int:
    """Choose the most keys of an item such that the step ends soonest, by an upper bound of its time.

    Tries the sizes that cut the longest sequence into 1, 2, ... equal items. The bound is the lesser of two: all waves
    with items of the largest size; all work spread evenly, plus one item (Graham).
    """
    longest = spans.max(keepdims=True)
    if longest[0] <= step:
        return step
    cuts = np.arange(1, min(max(PIECES, wave), most) + 1)
    pieces = np.unique(_ceil(_ceil(longest, cuts), step) * step)[::-1]  # many numbers of items have one size
    counts = np.maximum(_ceil(spans[None, :], pieces[:, None]), 1).sum(1)
    real = counts - int((spans == 0).sum())
    each = pieces + START
    waves = _ceil(real, wave) * each
    spread = (int(spans.sum()) + real * START) / wave + each
    joined = _ceil(longest, pieces)
    cost = np.minimum(waves, spread) + np.where(joined > 1, JOIN + joined * JOINED, 0)
    return int(pieces[np.where(counts <= most, cost, np.inf).argmin()])


def _ceil(keys: Ints, size: Ints | int) -> Ints:
    return -(-keys // size)


def placed(runs: Sequence[TokenRun]) -> tuple[list[Placed], list[Placed]]:
    """Split a step into decodes and prompt chunks."""
    decodes, chunks, row = list[Placed](), list[Placed](), 0
    for column, run in enumerate(runs):
        if run.tokens:
            (decodes if run.tokens == 1 else chunks).append((column, row, run))
        row += run.tokens
    return decodes, chunks


def prefill_tiles(
    runs: Sequence[Placed], tokens: int, window: Window | None, kv_heads: int, multiprocessors: int
) -> Table:
    """Cut prompt chunks into items (N, 8), as input of the prefill kernel, in descending number of keys.

    A tile has at most `tokens` tokens. If there are too few tiles for the multiprocessors, their keys are cut, too, so
    that a short chunk with a long context is not left to few programs.
    """
    tiles = [
        (column, row + start, min(tokens, run.tokens - start), run.position + start)
        for column, row, run in runs
        for start in range(0, run.tokens, tokens)
    ]
    tiles.sort(key=lambda tile: -tile[3])
    tiles_N4 = np.array(tiles, dtype=np.int64).reshape(-1, 4)
    ends = tiles_N4[:, 2] + tiles_N4[:, 3]
    begins = np.zeros_like(ends)
    if window is not None:
        begins = window.first(tiles_N4[:, 3]) // CHUNK_STEP * CHUNK_STEP
    spans = ends - begins
    sizes = np.maximum(_cut_chunks(spans, multiprocessors // kv_heads), 1)
    counts = np.maximum(_ceil(spans, sizes), 1)
    firsts = counts.cumsum() - counts
    of = np.repeat(np.arange(len(tiles)), counts)
    items = np.zeros((len(of), 8), dtype=np.int32)
    items[:, :4] = tiles_N4[of]
    items[:, 4] = begins[of] + (np.arange(len(of)) - firsts[of]) * sizes[of]
    items[:, 5] = np.minimum(items[:, 4] + sizes[of], ends[of])
    items[:, 6], items[:, 7] = firsts[of], counts[of]
    return items


def _cut_chunks(spans: Ints, wave: int) -> Ints:
    """Return the keys per item of each tile, in whole steps, such that there is about one wave of items."""
    whole = _ceil(spans, CHUNK_STEP) * CHUNK_STEP
    if len(spans) >= wave or not len(spans):
        return whole
    piece = max(CHUNK_LEAST, int(_ceil(spans.sum(keepdims=True), wave)[0]))
    while int(_ceil(spans, piece).sum()) > wave:
        piece += CHUNK_STEP
    return _ceil(_ceil(spans, _ceil(spans, piece)), CHUNK_STEP) * CHUNK_STEP


def page_table(runs: Sequence[TokenRun]) -> Table:
    """(longest, N): column i holds the pages of `runs[i]`, in order."""
    longest = max((len(run.pages) for run in runs), default=1)
    table = np.zeros((max(longest, 1), len(runs)), dtype=np.int32)
    for column, run in enumerate(runs):
        table[: len(run.pages), column] = run.pages
    return table
