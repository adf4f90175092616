"""Inputs of captured graphs: fixed buffers on the device, filled by one copy a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class InputBuffer:
    """int64 columns in one buffer on the device; `load` fills them with one copy."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._sizes = tuple(sizes)
        self._buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._loaded: list[list[int]] | None = None
        self.columns = torch.split(self._buffer, list(sizes))
        """Views of the device buffer, one a column, read by the graph."""

    def load(self, *columns: Sequence[int]) -> None:
        """Copy the columns to the device, in stream order, padded with zeros. The caller ensures that the previous copy
        has ended."""
        wanted = [list(column) for column in columns]
        if wanted == self._loaded:
            return
        self._host.zero_()
        for to, column in zip(torch.split(self._host, list(self._sizes)), wanted, strict=True):
            to[: len(column)] = torch.tensor(column, dtype=torch.int64)
        self._buffer.copy_(self._host, non_blocking=True)
        self._loaded = wanted


class InputCopies:
    """Guards one graph's pinned host inputs, which are rewritten for each step."""

    def __init__(self, device: torch.device) -> None:
        self._ended = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the previous step's copies, which have normally ended long before."""
        if self._ended is not None:
            self._ended.synchronize()

    def record(self) -> None:
        """Record that all copies of this step are in the stream."""
        if self._ended is not None:
            self._ended.record()
