"""Sizes of the steps that CUDA graphs are captured for. A step is padded to the next size."""

from __future__ import annotations

from dataclasses import dataclass

from coserve.kernels.attention.interface import MixedCapacity
from coserve.kernels.lora.segmented.plan import DECODE_ROWS, PREFILL_TILE_ROWS

DECODE_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sequences of a decode step: one token each."""
MIXED_TOKENS = (32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048)
"""Tokens of a mixed step: decodes and chunks of prompts. Up to about 256 rows a step costs the reading of the weights,
and padding is free. Beyond, it costs what tokens cost, and sizes lie closer together. Larger steps keep the device busy
for as long as the host needs to launch their kernels one by one."""
CHUNK_TOKENS, MIN_CHUNKS = 16, 4
"""A mixed graph holds one chunk for each `CHUNK_TOKENS` of its tokens, at least `MIN_CHUNKS`: idle attention tiles take
time."""
LORA_RANKS = (16, 32, 64, 128, 256)
"""Largest ranks of a step's adapters. A graph serves every rank up to its own; larger ranks have no graph."""
MIXED_ADAPTERS = (8, 32, 96)
"""Adapters of a mixed step, besides one for each sequence. Idle LoRA tiles take time."""
DECODE_KERNEL_TOKENS = 256
"""Mixed graphs of up to this many tokens use the LoRA decode kernels, however long their runs: a prefill tile of 64
rows takes as long with one row as with all."""
PARTIAL_FOOTPRINTS = 2
"""LoRA footprints that leave out some groups of sites and get graphs of their own. Others use the graphs of all
groups."""
CAPTURE_AFTER = 4
"""Mixed steps that found no graph of their size, after which it is captured though there is work. Without a graph, such
a step takes the host several times as long, and Triton may have to compile."""


@dataclass(frozen=True)
class TileCapacity:
    """LoRA tiles that a graph holds."""

    rows: int
    """Rows of a tile."""
    tiles: int


def decode_batches(max_running: int) -> tuple[int, ...]:
    """Decode batches for steps of up to `max_running` sequences, as far as there are sizes."""
    reached = tuple(size for size in DECODE_BATCHES if size < max_running)
    return DECODE_BATCHES[: len(reached) + 1]


def graph_rank(rank: int) -> int | None:
    """Rank of the graphs that serve a step whose largest rank is `rank`; None: no graph does."""
    return next((size for size in LORA_RANKS if size >= rank), None)


def mixed_capacities(step_tokens: int, sequences: int, context: int) -> tuple[MixedCapacity, ...]:
    """Capacities of the graphs of mixed steps of up to `step_tokens` tokens, smallest first."""
    largest = next((tokens for tokens in MIXED_TOKENS if tokens >= step_tokens), MIXED_TOKENS[-1])
    return tuple(
        MixedCapacity(
            tokens=tokens,
            sequences=min(tokens, sequences),
            chunks=min(tokens, sequences, max(MIN_CHUNKS, tokens // CHUNK_TOKENS)),
            context=context,
        )
        for tokens in MIXED_TOKENS
        if tokens <= largest
    )


def mixed_tile_capacities(
    tokens: int, sequences: int, *, decode_kernel_tokens: int = DECODE_KERNEL_TOKENS
) -> tuple[TileCapacity, ...]:
    """LoRA tiles of mixed steps of up to `tokens` rows and `sequences` sequences, fewest first.

    A tile holds rows of one adapter, so each adapter adds at most one tile that is not full.
    """
    small = tokens <= decode_kernel_tokens
    rows = DECODE_ROWS[0] if small else PREFILL_TILE_ROWS
    full = -(-tokens // rows)
    most = min(full + sequences - 1, tokens)
    some = [full + adapters for adapters in MIXED_ADAPTERS if small or full < 2 * adapters]
    return tuple(TileCapacity(rows, tiles) for tiles in (*(tiles for tiles in some if tiles < most), most))


def decode_tile_capacities(batch: int) -> tuple[TileCapacity, ...]:
    """LoRA tiles of decode steps of up to `batch` rows, least work first: an empty tile costs the launch of its
    program.

    Tall tiles for the rows of one adapter; low tiles from there, doubled up to one tile a row.
    """
    low, tall = DECODE_ROWS
    found = [TileCapacity(low, -(-batch // low))]
    while found[-1].tiles < batch:
        found.append(TileCapacity(low, min(2 * found[-1].tiles, batch)))
    return (TileCapacity(tall, -(-batch // tall)), *found) if batch > low else tuple(found)
