"""The long runs of generation steps, in chunks, from their sequences' slots and back into them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from coserve.kernels.gpu.device import put
from coserve.kernels.gpu.rounding import cdiv
from coserve.kernels.recurrent.chunked.recurrence import (
    LEAST_SIZE,
    MOST_KEYS,
    ChunkedRecurrence,
    ChunkShape,
    SlotStates,
    cut,
)
from coserve.kernels.recurrent.interface import RecurrenceInputs
from coserve.kernels.recurrent.reference import CHUNK

PROMPTS = ChunkShape(values=32, stages=2, part=8, compact=False, exact=False, outputs=128)
"""The fastest of `benchmarks.recurrent.prompts` on an H200."""


def fits(keys: int, values: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether prompts are computed in chunks: heads of this many keys and values, inputs of this dtype."""
    if device.type != "cuda":
        return keys <= MOST_KEYS
    return dtype != torch.float32 and LEAST_SIZE <= keys <= MOST_KEYS and values >= LEAST_SIZE


class LongRuns:
    """Runs of at least `least` tokens, in steps of up to `tokens` tokens of `sequences` sequences.

    Buffers and grids are fixed, as a CUDA graph needs them: there is room for as many chunks as such runs may have, and
    programs of chunks that a step lacks end at once.
    """

    def __init__(
        self, tokens: int, sequences: int, least: int, device: torch.device, shape: ChunkShape = PROMPTS
    ) -> None:
        self.least, most = least, max(1, min(sequences, tokens // least))
        chunks = tokens // CHUNK + most  # all are whole, but the last of each run
        sizes = [
            4 * cdiv(size, 4) for size in (2 * chunks, most + 1, most, most)
        ]  # aligned, for one variant of a kernel
        self._host = np.zeros(sum(sizes), dtype=np.int32)
        self._table = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._columns = np.split(self._host, np.cumsum(sizes[:-1]))
        rows, first, self._sources, self._to = torch.split(self._table, sizes)
        self._chunks = ChunkedRecurrence(rows[: 2 * chunks].view(-1, 2), first[: most + 1], shape=shape)

    def load(self, spans: Sequence[tuple[int, int]], sources: Sequence[int], to: Sequence[int]) -> None:
        """Set the runs of the next step: their rows, and the slots of their states before and after it. Does not wait
        for the device."""
        rows, first, before, after = self._columns
        own_rows, own_first = cut(spans)
        rows[:], first[:] = 0, own_first[-1]
        rows[: len(own_rows)], first[: len(own_first)] = own_rows, own_first
        before[: len(spans)], after[: len(spans)] = sources, to
        put(torch.from_numpy(self._host), self._table)

    def recur(self, given: RecurrenceInputs, out_THV: Tensor, states: Tensor) -> None:
        """Compute `Recurrence.recur` for the runs' rows into `out_THV`. `states`: a layer's, (slots, H, K, V)."""
        self._chunks.recur(given, out_THV, SlotStates(states, self._sources, self._to))
