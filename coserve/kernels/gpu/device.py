"""Properties of GPUs that kernel launches depend on."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from coserve.core.errors import ConfigError


@dataclass(frozen=True)
class DeviceInfo:
    """Properties of one GPU."""

    multiprocessors: int
    shared_bytes: int
    """Shared memory per program, in bytes."""
    early_launch: bool
    """Whether a kernel may start before the preceding one has ended (programmatic dependent launch, sm_90 and
    later)."""


H200 = DeviceInfo(multiprocessors=132, shared_bytes=227 * 1024, early_launch=True)
"""The GPU on which block sizes were measured. Launches in Triton's interpreter on a CPU use its properties."""


def usable_device(name: str) -> torch.device:
    """Return the device of this name; `auto`: a GPU if there is a usable one. Raises `ConfigError`."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: expected cpu or auto, got 'cuda' and found no usable GPU", field="device")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


_counts: dict[int | None, int] = {}
"""Multiprocessors that launches may assume, by stream handle; the entry None is for all other streams. If empty, the
whole GPU's."""


def count_multiprocessors(count: int, stream: int | None = None) -> None:
    """Let launches on this stream assume `count` multiprocessors. `stream`: its handle; None: all streams without a
    count of their own."""
    _counts[stream] = count


def forget_counts() -> None:
    """Let launches assume all multiprocessors again."""
    _counts.clear()


def of_a_part(stream: torch.cuda.Stream) -> bool:
    """Whether the stream has multiprocessors of its own."""
    return stream.cuda_stream in _counts


def device_info(device: torch.device) -> DeviceInfo:
    """Return the properties of `device`, restricted to the current stream's multiprocessors.

    On a CPU: an H200 without early launch, so that tests there cut batches as a GPU does.
    """
    if not _counts or device.type != "cuda":
        return _whole(device)
    stream = torch._C._cuda_getCurrentRawStream(
        device.index or 0
    )  # `torch.cuda.current_stream` costs the host microseconds
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


def use_device(device: torch.device) -> None:
    """Set CUDA's current device, which is per thread and defaults to the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


def interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter (for tests without a GPU)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def put(host: Tensor, to: Tensor) -> None:
    """Copy into device memory in stream order, without waiting for it. torch keeps the new pinned buffer until the copy
    has ended, so `host` may change, and the next copy come, at any time."""
    to.copy_(host.pin_memory() if to.is_cuda else host, non_blocking=True)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy to the device in stream order, without waiting for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
