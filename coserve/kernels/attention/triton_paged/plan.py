"""How the fused attention kernels cut a step, on the host: items of about one size for decode, tiles for chunks of
prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coserve.kernels.attention.interface import TokenRun

Ints = NDArray[np.int64]
Table = NDArray[np.int32]

BEYOND = 128
"""Programs that a grid has for cutting long sequences, beyond one for each sequence; those that find no work still
start."""
CHUNK_STEP, CHUNK_LEAST = 128, 512
"""Items of a chunk's keys are of whole steps of so many, and hold at least so many."""
PIECES = 40
"""The longest sequence is cut into so many items at most (unless a wave takes more)."""
START, JOIN, JOINED = 128, 128, 4
"""What an item, a join, and each item of a join cost, in keys of one item."""


def programs_each(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Programs of the decode kernel that shall run side by side on one multiprocessor, in a step of `rows` sequences.

    The fewer, the more memory each has and the larger its steps; but all sequences at once come before that.
    """
    return next((each for each in (1, 2, 3) if rows * kv_heads <= each * multiprocessors), 4)


def _wave(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Items that run at once."""
    return max(1, programs_each(rows, kv_heads, multiprocessors) * multiprocessors // kv_heads)


def _step(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Items are of whole steps of so many keys."""
    return 128 if programs_each(rows, kv_heads, multiprocessors) == 1 else 64


def items_for(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """The most items that `decode_items` makes for `rows` sequences: what a graph's grid must hold."""
    return max(_wave(rows, kv_heads, multiprocessors), rows + BEYOND // kv_heads)


def decode_items(
    contexts: Ints, rows: Ints, window: int | None, most: int, kv_heads: int, multiprocessors: int
) -> Table:
    """Items (W, 8), W <= `most`, of one new token for each sequence, as `attention_decode` takes them.

    `contexts` (N): tokens of each sequence with the new one, 0 for a row that is padding. `rows` (N): its row of q;
    its column of the table is its place here.
    """
    begins = np.zeros_like(contexts) if window is None else np.maximum(contexts - window, 0)
    spans = contexts - begins
    step = _step(len(contexts), kv_heads, multiprocessors)
    piece = _piece(spans, most, _wave(len(contexts), kv_heads, multiprocessors), step)
    # As many items as pieces of that size need, but all of a sequence's of one size.
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
    """Keys of an item at most, such that the step should end soonest.

    Sizes that cut the longest sequence into 1, 2, ... equal items are tried. A step ends no later than waves of items
    of the largest size do, and no later than all work spread evenly, plus one item (Graham).
    """
    longest = spans.max(keepdims=True)
    if longest[0] <= step:
        return step
    pieces = _ceil(_ceil(longest, np.arange(1, min(max(PIECES, wave), most) + 1)), step) * step
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


def prefill_tiles(
    runs: Sequence[tuple[int, int, TokenRun]], tokens: int, window: int | None, kv_heads: int, multiprocessors: int
) -> Table:
    """Items (N, 8) of chunks, as `attention_prefill` takes them; those of most keys first.

    `runs`: (column of the table, first row of q, run). A tile has at most `tokens` tokens. Where tiles are too few for
    the multiprocessors, their keys are cut, too: a short chunk far down its sequence is not left to a few programs.
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
        begins = np.maximum(tiles_N4[:, 3] - window + 1, 0) // CHUNK_STEP * CHUNK_STEP
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
    """Keys of an item of each tile, in whole steps, such that the items make about a wave."""
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
