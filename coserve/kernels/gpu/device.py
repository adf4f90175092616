"""Device facts that kernel launches depend on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class DeviceInfo:
    """Facts of one GPU."""

    multiprocessors: int
    shared_bytes: int
    """Shared memory that one program may use."""
    early_launch: bool
    """Whether a kernel may start before the preceding one has ended (programmatic dependent launch, sm_90 and later)."""


H200 = DeviceInfo(multiprocessors=132, shared_bytes=227 * 1024, early_launch=True)
"""The GPU that block sizes were measured on. Triton's interpreter on a CPU uses the same launches."""


@cache
def device_info(device: torch.device) -> DeviceInfo:
    """The facts of `device`. For a CPU: an H200 without early launch, so that tests there cut batches as a GPU does."""
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
