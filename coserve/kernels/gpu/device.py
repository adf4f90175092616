"""Device facts that kernel launches depend on."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache

import torch


@dataclass(frozen=True)
class DeviceInfo:
    """Facts of one GPU."""

    multiprocessors: int
    shared_bytes: int
    """Shared memory that one program may use."""
    early_launch: bool
    """Whether a kernel may start before the preceding one has ended (programmatic dependent launch, sm_90 and
    later)."""


H200 = DeviceInfo(multiprocessors=132, shared_bytes=227 * 1024, early_launch=True)
"""The GPU that block sizes were measured on. Triton's interpreter on a CPU uses the same launches."""


_counts: dict[int | None, int] = {}
"""Multiprocessors that launches count, by the handle of their stream; under None those of other streams. Empty: all of
the GPU."""


def count_multiprocessors(count: int, stream: int | None = None) -> None:
    """From now on launches on the stream with this handle have `count` multiprocessors; None: those on streams without
    a count."""
    _counts[stream] = count


def forget_counts() -> None:
    """Launches have all multiprocessors again."""
    _counts.clear()


def of_a_part(stream: torch.cuda.Stream) -> bool:
    """Whether the stream has multiprocessors of its own."""
    return stream.cuda_stream in _counts


def device_info(device: torch.device) -> DeviceInfo:
    """The facts of `device`, as far as the current stream may use it. For a CPU: an H200 without early launch, so that
    tests there cut batches as a GPU does."""
    if not _counts or device.type != "cuda":
        return _whole(device)
    stream = torch._C._cuda_getCurrentRawStream(
        device.index or 0
    )  # `torch.cuda.current_stream` takes the host microseconds
    count = _counts.get(stream, _counts.get(None))
    return _whole(device) if count is None else _part(device, count)


@cache
def _part(device: torch.device, multiprocessors: int) -> DeviceInfo:
    return replace(_whole(device), multiprocessors=multiprocessors)


@cache
def _whole(device: torch.device) -> DeviceInfo:
    if device.type != "cuda":
        return DeviceInfo(H200.multiprocessors, H200.shared_bytes, early_launch=False)
    found = torch.cuda.get_device_properties(device)
    return DeviceInfo(
        multiprocessors=found.multi_processor_count,
        shared_bytes=found.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # torch's stub lacks it
        early_launch=(found.major, found.minor) >= (9, 0),
    )


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter (for tests without a GPU)."""
    return os.environ.get("TRITON_INTERPRET") == "1"
