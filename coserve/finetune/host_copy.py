"""Copies between a tensor on a device and host memory, beside other work of the device."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Elements (16 MiB) of one transfer: transfers of other streams wait for at most one of these."""


class HostCopy:
    """Host memory for the rows of a fp32 tensor (K, N). On a GPU it is pinned, and a side stream does the copying.

    Allocating pinned memory may take long: make it on a thread, once for many copies.
    """

    def __init__(self, source_KN: Tensor) -> None:
        self._source_KN, self._device = source_KN, source_KN.device
        on_gpu = self._device.type == "cuda"
        self.host_KN = torch.empty(source_KN.shape, dtype=source_KN.dtype, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event(blocking=True) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copying = False

    def download(self, rows: int) -> None:
        """Begin to copy the first `rows` rows as they are after what the current stream has been given.

        Not before `wait` has returned for the copy before.
        """
        if self._stream is None or self._copied is None:
            self.host_KN[:rows].copy_(self._source_KN[:rows])
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._transfer(self._stream, self._source_KN[:rows], self.host_KN[:rows])
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
        if self._stream is None:
            self._source_KN[:rows].copy_(self.host_KN[:rows])
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._transfer(self._stream, self.host_KN[:rows], self._source_KN[:rows])
        self._stream.synchronize()

    @staticmethod
    def _transfer(stream: torch.cuda.Stream, source_KN: Tensor, target_KN: Tensor) -> None:
        source_M, target_M = source_KN.view(-1), target_KN.view(-1)
        with torch.cuda.stream(stream):
            for start in range(0, source_M.numel(), CHUNK):
                target_M[start : start + CHUNK].copy_(source_M[start : start + CHUNK], non_blocking=True)
