"""Packed recurrences in CUDA graphs: one captured launch serves every batch with the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from coserve.kernels.recurrent.chunked.tables import ChunkTables
from coserve.kernels.recurrent.interface import RecurrenceInputs
from coserve.kernels.recurrent.packed import PackedRecurrence

if TYPE_CHECKING:
    from coserve.kernels.recurrent.chunked.recurrence import ChunkedRecurrence


class FixedRecurrence(PackedRecurrence):
    """Packed recurrences of up to `most` sequences, without autograd, whose tables lie at a fixed device address."""

    def __init__(self, bounds: Sequence[int], most: int, device: torch.device) -> None:
        super().__init__(bounds)
        self._most, self._device = most, device
        self._fixed: ChunkTables | None = None
        """From the first use on: most models have no recurrence."""
        self.capturable = True
        """Whether all launches so far serve any batch; those of plain torch depend on the sequences' lengths."""

    def take(self, bounds: Sequence[int]) -> None:
        """Switch to another batch, in stream order. It must have the same number of tokens."""
        self._set(bounds)
        if self._fixed is not None:
            self._load(self._fixed)

    def offsets(self, device: torch.device) -> Tensor:
        return self._tables().columns[0]

    def _kernels_for(self, given: RecurrenceInputs) -> ChunkedRecurrence | None:
        found = super()._kernels_for(given)
        self.capturable &= found is not None or not given.v.is_cuda
        return found

    def _new_kernels(self, device: torch.device) -> ChunkedRecurrence:
        from coserve.kernels.recurrent.chunked.recurrence import ChunkedRecurrence  # needs Triton

        tables = self._tables()
        return ChunkedRecurrence(tables.chunks, tables.first)

    def _tables(self) -> ChunkTables:
        if self._fixed is None:
            self._fixed = ChunkTables(self._rows, self._most, (self._rows,), self._device)
            self._load(self._fixed)
        return self._fixed

    def _load(self, tables: ChunkTables) -> None:
        tables.load(self._spans, np.concatenate([np.arange(end - start, dtype=np.int32) for start, end in self._spans]))
