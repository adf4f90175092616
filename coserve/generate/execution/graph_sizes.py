"""Step sizes that CUDA graphs are captured for. A step is padded to the next size."""

from __future__ import annotations

from dataclasses import dataclass

from coserve.core.gpu_memory import LORA_RANKS
from coserve.kernels.attention.interface import MixedCapacity
from coserve.kernels.lora.segmented.plan import DECODE_ROWS, PREFILL_TILE_ROWS

DECODE_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sequences of a decode step: one token each."""
MIXED_TOKENS = (32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048)
"""Tokens of a mixed step: decodes and prompt chunks. Up to about 256 tokens a step is bound by reading the weights, and
padding is free; beyond, padding costs time and the sizes lie closer together. Steps above the largest size keep the
device busy while the host launches their kernels one by one."""
CHUNK_TOKENS, MIN_CHUNKS = 16, 4
"""A mixed graph holds one prompt chunk for each `CHUNK_TOKENS` tokens, at least `MIN_CHUNKS`: idle attention tiles cost
time."""
SMALL_STEP_ADAPTERS = (8, 32, 96)
"""Adapters that the LoRA tiles of a mixed graph of up to `DECODE_KERNEL_TOKENS` tokens provide for. A last capacity has
one for each sequence. Idle LoRA tiles cost time."""
DECODE_KERNEL_TOKENS = 256
"""Mixed graphs of up to this many tokens use the LoRA decode kernels, even for long runs: a prefill tile of 64 rows
takes as long for one row as for all."""
PARTIAL_GROUPS = 2
"""Most choices of some site groups that get their own graphs, for each LoRA rank. Others use the graphs of
more groups."""


@dataclass(frozen=True)
class TileCapacity:
    """LoRA tiles that a graph has room for."""

    rows: int
    """Rows of a tile."""
    tiles: int

    @property
    def decode(self) -> bool:
        """Whether the LoRA decode kernels compute them, not the prefill kernels."""
        return self.rows < PREFILL_TILE_ROWS


def decode_batches(max_running: int) -> tuple[int, ...]:
    """Decode batch sizes for up to `max_running` sequences, limited by `DECODE_BATCHES`."""
    reached = tuple(size for size in DECODE_BATCHES if size < max_running)
    return DECODE_BATCHES[: len(reached) + 1]


def graph_rank(rank: int) -> int | None:
    """The smallest LoRA rank of a graph that serves steps of up to `rank`; None: no graph does."""
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


def padded_step(step_tokens: int, max_running: int) -> int:
    """The most tokens of a step of up to `step_tokens` tokens and `max_running` sequences, padding included."""
    mixed = mixed_capacities(step_tokens, max_running, 1)[-1].tokens
    return max(step_tokens, mixed, decode_batches(max_running)[-1])


def mixed_tile_capacities(
    tokens: int, sequences: int, *, decode_kernel_tokens: int = DECODE_KERNEL_TOKENS
) -> tuple[TileCapacity, ...]:
    """Capacities for the LoRA tiles of mixed steps of up to `tokens` rows and `sequences` sequences, least work first.

    A tile holds rows of one adapter, so each adapter adds at most one tile that is not full. Larger steps use the
    prefill kernels for as many adapters as they have full tiles, and the decode kernels for more: of 2,048 tokens with
    32 adapters 6.3 and 6.8 ms, with 96 9.5 and 8.2; of 512 with 32 adapters 3.5 and 2.6.
    """
    low, tall = DECODE_ROWS[0], PREFILL_TILE_ROWS
    most_low = min(-(-tokens // low) + sequences - 1, tokens)
    if tokens <= decode_kernel_tokens:
        some = [-(-tokens // low) + adapters for adapters in SMALL_STEP_ADAPTERS]
        return tuple(TileCapacity(low, tiles) for tiles in (*(tiles for tiles in some if tiles < most_low), most_low))
    full = -(-tokens // tall)
    if sequences <= full:
        return (TileCapacity(tall, full + sequences - 1),)
    return TileCapacity(tall, 2 * full), TileCapacity(low, most_low)


def decode_tile_capacities(batch: int) -> tuple[TileCapacity, ...]:
    """Capacities for the LoRA tiles of decode steps of up to `batch` rows, least work first: an empty tile costs a
    program launch.

    First tall tiles, enough for the rows of one adapter; then low tiles, doubled up to one tile per row.
    """
    low, tall = DECODE_ROWS
    found = [TileCapacity(low, -(-batch // low))]
    while found[-1].tiles < batch:
        found.append(TileCapacity(low, min(2 * found[-1].tiles, batch)))
    return (TileCapacity(tall, -(-batch // tall)), *found) if batch > low else tuple(found)
