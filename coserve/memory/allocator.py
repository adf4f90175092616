"""Statistics of torch's memory allocators. A call of cudaMalloc or cudaFree may stall the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coserve.core.link.stats import AllocatorStats


def allocator_stats(device: torch.device) -> AllocatorStats:
    """Return the counts. It takes some ten microseconds, so it is not called in every step."""
    if device.type != "cuda":
        return AllocatorStats()
    gpu = torch.cuda.memory_stats_as_nested_dict(device)
    if not gpu:  # nothing was allocated yet
        return AllocatorStats()
    host = torch.cuda.host_memory_stats_as_nested_dict()
    return AllocatorStats(
        peak=gpu["allocated_bytes"]["all"]["peak"],
        allocs=gpu.get("num_device_alloc", 0),
        frees=gpu.get("num_device_free", 0),
        retries=gpu.get("num_alloc_retries", 0),
        pinned=host.get("num_host_alloc", 0),
    )


@dataclass(frozen=True)
class Reading:
    """The device's memory and this process's allocator at one moment, in bytes."""

    total: int
    free: int
    reserved: int
    allocated: int
    peak: int

    @property
    def outside(self) -> int:
        """Bytes in use outside this process's allocator: CUDA's context and libraries, other processes."""
        return max(0, self.total - self.free - self.reserved)


def read_device(device: torch.device) -> Reading:
    """Read the memory of a GPU. Takes some ten microseconds."""
    free, total = torch.cuda.mem_get_info(device)
    gpu = torch.cuda.memory_stats_as_nested_dict(device)
    allocated = gpu["allocated_bytes"]["all"]
    return Reading(
        total=total,
        free=free,
        reserved=gpu["reserved_bytes"]["all"]["current"],
        allocated=allocated["current"],
        peak=allocated["peak"],
    )
