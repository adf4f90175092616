"""The long runs of generation steps, in chunks, from their sequences' slots and back into them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.kernels.recurrent.chunked.recurrence import (
    LEAST_SIZE,
    MOST_KEYS,
    ChunkedRecurrence,
    ChunkShape,
    SlotStates,
)
from coserve.kernels.recurrent.chunked.tables import ChunkTables
from coserve.kernels.recurrent.interface import RecurrenceInputs

PROMPTS = ChunkShape(values=32, stages=2, part=8, compact=False, exact=False, outputs=128)
"""The fastest of `benchmarks.recurrent.prompts` on an H200."""


def fits(keys: int, values: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether prompts are computed in chunks: heads of this many keys and values, inputs of this dtype."""
    if device.type != "cuda":
        return keys <= MOST_KEYS
    return dtype != torch.float32 and LEAST_SIZE <= keys <= MOST_KEYS and values >= LEAST_SIZE


class LongRuns:
    """Runs of at least `least` tokens, in steps of up to `tokens` tokens of `sequences` sequences.

    Buffers and grids are fixed, as a CUDA graph needs them.
    """

    def __init__(
        self, tokens: int, sequences: int, least: int, device: torch.device, shape: ChunkShape = PROMPTS
    ) -> None:
        self.least, most = least, max(1, min(sequences, tokens // least))
        self._tables = ChunkTables(tokens, most, (most, most), device)
        self._chunks = ChunkedRecurrence(self._tables.chunks, self._tables.first, shape=shape)

    def load(self, spans: Sequence[tuple[int, int]], sources: Sequence[int], to: Sequence[int]) -> None:
        """Set the runs of the next step: their rows, and the slots of their states before and after it. Does not wait
        for the device."""
        self._tables.load(spans, sources, to)

    def recur(self, given: RecurrenceInputs, out_THV: Tensor, states: Tensor) -> None:
        """Compute `Recurrence.recur` for the runs' rows into `out_THV`. `states`: a layer's, (slots, H, K, V)."""
        self._chunks.recur(given, out_THV, SlotStates(states, *self._tables.columns))
