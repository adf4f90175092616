"""Which rows a recurrence's chunks have, at a fixed device address, so that a CUDA graph serves any batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from coserve.kernels.gpu.device import put
from coserve.kernels.gpu.rounding import cdiv
from coserve.kernels.recurrent.reference import CHUNK


def cut(spans: Sequence[tuple[int, int]], chunk: int = CHUNK) -> tuple[list[int], list[int]]:
    """Cut non-empty spans of rows into chunks: first row and end of each chunk, one after another, and each span's
    first chunk, followed by the number of chunks."""
    rows = [row for start, end in spans for at in range(start, end, chunk) for row in (at, min(at + chunk, end))]
    return rows, [0, *accumulate(cdiv(end - start, chunk) for start, end in spans)]


class ChunkTables:
    """The chunks of up to `sequences` spans in `tokens` rows, and columns of int32 of these sizes.

    There is room for as many chunks as such spans may have; programs of chunks that a batch lacks end at once.
    """

    def __init__(self, tokens: int, sequences: int, columns: Sequence[int], device: torch.device) -> None:
        chunks = tokens // CHUNK + sequences  # all are whole, but the last of each span
        sizes = [2 * chunks, sequences + 1, *columns]
        aligned = [4 * cdiv(size, 4) for size in sizes]  # for one variant of a kernel
        self._host = np.zeros(sum(aligned), dtype=np.int32)
        self._device = torch.zeros(sum(aligned), dtype=torch.int32, device=device)
        self._columns = np.split(self._host, np.cumsum(aligned[:-1]))
        rows, *others = (one[:size] for one, size in zip(torch.split(self._device, aligned), sizes, strict=True))
        self.chunks, self.first, self.columns = rows.view(-1, 2), others[0], others[1:]
        """(chunks, 2), (sequences + 1) and the further columns, int32 on the device."""

    def load(self, spans: Sequence[tuple[int, int]], *columns: Sequence[int] | NDArray[np.int32]) -> None:
        """Set the spans and the beginnings of the columns, in stream order. Does not wait for the device."""
        rows, first, *others = self._columns
        own_rows, own_first = cut(spans)
        rows[:], first[:] = 0, own_first[-1]
        rows[: len(own_rows)], first[: len(own_first)] = own_rows, own_first
        for own, new in zip(others, columns, strict=True):
            own[: len(new)] = new
        put(torch.from_numpy(self._host), self._device)
