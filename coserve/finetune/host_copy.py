"""Copies between device tensors and host memory, overlapped with other work of the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

REST = 0.002
"""Pause in seconds between two allocations of pinned memory: each blocks other threads' CUDA calls while it runs."""


def host_row(size: int, block: int, dtype: torch.dtype, *, pinned: bool) -> list[Tensor]:
    """Allocate host memory for a row of `size` elements, in blocks of `block` elements; the last one may be shorter."""
    found = []
    for start in range(0, size, block):
        found.append(torch.empty(min(block, size - start), dtype=dtype, pin_memory=pinned))
        if pinned:
            time.sleep(REST)
    return found


class HostCopy:
    """Host memory for K rows (1-D tensors of any dtype), in blocks. On a GPU it is pinned, and a side stream copies.

    Other threads' transfers and allocations wait for one block at most. Construct it on a worker thread and reuse it:
    allocating pinned memory is slow.
    """

    def __init__(self, source: Sequence[Tensor], blocks: Sequence[int], size: int | None = None) -> None:
        """`blocks`: block size of each row, in elements. `size`: elements of every row in host memory; None: as in the
        source."""
        self._source, self._device = source, source[0].device
        on_gpu = self._device.type == "cuda"
        self.rows = [
            host_row(row_N.shape[0] if size is None else size, block, row_N.dtype, pinned=on_gpu)
            for row_N, block in zip(source, blocks, strict=True)
        ]
        """Blocks of each row, in order; the last of a row may be shorter."""
        self._blocks = blocks
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event(blocking=True) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copying = False

    def download(self, rows: int) -> None:
        """Begin to copy the first `rows` rows to the host, in their state after the work queued on the current stream.

        `wait` must have returned for the previous download.
        """
        self._download(rows)
        if self._stream is not None and self._copied is not None:
            self._copied.record(self._stream)
            self._copying = True

    def protect(self) -> None:
        """Make the current stream (not the caller) wait for the download. Call it before the rows change."""
        if self._copying and self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copying = False

    def wait(self) -> None:
        """Wait for the copy that `download` began; on any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self, rows: int) -> None:
        """Copy the first `rows` rows to the device and wait for it; call it on a worker thread."""
        self._upload(rows)
        if self._stream is not None:
            self._stream.synchronize()

    def _download(self, rows: int) -> None:
        self._transfer(rows, lambda host, device: host.copy_(device, non_blocking=True))

    def _upload(self, rows: int) -> None:
        self._transfer(rows, lambda host, device: device.copy_(host, non_blocking=True))

    @torch.no_grad()
    def _transfer(self, rows: int, copy: Callable[[Tensor, Tensor], object]) -> None:
        """Call `copy` for each block and the matching slice of the source, on the side stream, after the work queued on
        the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # None: no effect
            for hosts, row_N, block in zip(self.rows[:rows], self._source, self._blocks, strict=False):
                for host, device in zip(hosts, torch.split(row_N, block), strict=True):
                    copy(host, device)
