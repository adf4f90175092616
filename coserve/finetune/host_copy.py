"""Copies between a tensor on a device and host memory, beside other work of the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

REST = 0.002
"""Seconds between two allocations of pinned memory: each blocks CUDA calls of other threads while it runs."""


def host_row(size: int, block: int, dtype: torch.dtype, *, pinned: bool) -> list[Tensor]:
    """Host memory for a row of `size` elements, in blocks of `block` of them; the last one may be shorter."""
    found = []
    for start in range(0, size, block):
        found.append(torch.empty(min(block, size - start), dtype=dtype, pin_memory=pinned))
        if pinned:
            time.sleep(REST)
    return found


class HostCopy:
    """Host memory for rows (K), 1-D tensors of any dtype, in blocks. On a GPU it is pinned, and a side stream does the
    copying.

    Transfers and allocations of other threads wait for those of one block at most. Make it on a thread, once for many
    copies: allocating pinned memory takes long.
    """

    def __init__(self, source: Sequence[Tensor], blocks: Sequence[int], size: int | None = None) -> None:
        """`blocks`: elements of each row's. `size`: of every row in host memory; None: as the source's."""
        self._source, self._device = source, source[0].device
        on_gpu = self._device.type == "cuda"
        self.rows = [
            host_row(row_N.shape[0] if size is None else size, block, row_N.dtype, pinned=on_gpu)
            for row_N, block in zip(source, blocks, strict=True)
        ]
        """Blocks of each row, in order; a row's last one may be shorter."""
        self._blocks = blocks
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event(blocking=True) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copying = False

    def download(self, rows: int) -> None:
        """Begin to copy the first `rows` rows as they are after what the current stream has been given.

        Not before `wait` has returned for the copy before.
        """
        self._download(rows)
        if self._stream is not None and self._copied is not None:
            self._copied.record(self._stream)
            self._copying = True

    def protect(self) -> None:
        """Call before the rows change: the current stream waits for the copy, the caller does not."""
        if self._copying and self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copying = False

    def wait(self) -> None:
        """On any thread: wait for the copy that `download` began."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self, rows: int) -> None:
        """Copy the first `rows` rows to the device. On a thread: it waits for the copy."""
        self._upload(rows)
        if self._stream is not None:
            self._stream.synchronize()

    def _download(self, rows: int) -> None:
        self._transfer(rows, lambda host, device: host.copy_(device, non_blocking=True))

    def _upload(self, rows: int) -> None:
        self._transfer(rows, lambda host, device: device.copy_(host, non_blocking=True))

    @torch.no_grad()
    def _transfer(self, rows: int, copy: Callable[[Tensor, Tensor], object]) -> None:
        """Call `copy` for each block and its part of the source, on the side stream, after what the current stream was
        given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # nothing happens where that is None
            for hosts, row_N, block in zip(self.rows[:rows], self._source, self._blocks, strict=False):
                for host, device in zip(hosts, torch.split(row_N, block), strict=True):
                    copy(host, device)
