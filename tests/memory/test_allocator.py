"""What torch's own statistics are called."""

from __future__ import annotations

import pytest
import torch

from coserve.memory.allocator import AllocatorStats, allocator_stats


def test_no_gpu_no_numbers() -> None:
    assert allocator_stats(torch.device("cpu")) == AllocatorStats()


@pytest.mark.gpu
def test_allocations_are_counted() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()  # of tests before this one
    torch.cuda.reset_peak_memory_stats(device)
    kept = [torch.empty(64 << 20, dtype=torch.uint8, device=device)]
    before = allocator_stats(device)
    kept += [
        torch.empty(64 << 20, dtype=torch.uint8, device=device),
        torch.empty(3 << 26, dtype=torch.uint8, pin_memory=True),
    ]
    after = allocator_stats(device)
    assert after.peak >= before.peak + (64 << 20)
    assert (after.allocs, after.pinned) == (before.allocs + 1, before.pinned + 1)
    del kept
    torch.cuda.empty_cache()
    assert allocator_stats(device).frees > before.frees
