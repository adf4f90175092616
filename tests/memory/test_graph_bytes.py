"""What torch's allocator tells, and what counts as memory of CUDA graphs while other threads and processes allocate."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from coserve.core.link.stats import AllocatorStats
from coserve.memory.allocator import allocator_stats
from coserve.memory.graph_bytes import DRIVER, Captures, GraphBytes


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


MIB = 1 << 20


@dataclass
class Pool:
    memory: tuple[int, int] = (0, 1)

    @property
    def stream(self) -> torch.cuda.Stream:
        raise AssertionError("the memory is a fake")


@dataclass
class Memory:
    """Bytes that the captures' pool and stream hold, that the rest of the allocator holds, and that are held
    outside."""

    captures: int = 0
    others: int = 0
    outside: int = 0
    reads: int = 0

    def free(self) -> int:
        return (1 << 40) - self.captures - self.others - self.outside

    def reserved(self) -> int:
        return self.captures + self.others

    def held(self, captures: Captures) -> int:
        self.reads += 1
        return self.captures


def test_captures_and_what_the_driver_takes_are_counted() -> None:
    memory = Memory(captures=7 * MIB)
    graphs = GraphBytes(memory)
    for _ in range(2):
        with graphs.capturing(Pool()):
            memory.captures += 20 * MIB
            memory.outside += 3 * MIB
    assert graphs.size == 46 * MIB, "the stream held 7 MiB before"


def test_what_a_starting_job_allocates_meanwhile_is_not_counted() -> None:
    memory = Memory()
    graphs = GraphBytes(memory)
    with graphs.capturing(Pool()):
        memory.captures += 20 * MIB
        memory.others += 2048 * MIB
    assert graphs.size == 20 * MIB
    with graphs.capturing(Pool()):
        memory.captures += 10 * MIB
        memory.others -= 2048 * MIB
        memory.outside += 2 * MIB
    assert graphs.size == 32 * MIB


def test_what_other_processes_take_is_bounded() -> None:
    memory = Memory()
    graphs = GraphBytes(memory)
    with graphs.capturing(Pool()):
        memory.outside += 4096 * MIB
    assert graphs.size == DRIVER


def test_pieces_that_allocate_nothing_do_not_look_at_each_segment() -> None:
    memory = Memory()
    graphs = GraphBytes(memory)
    for _ in range(9):
        with graphs.capturing(Pool()):
            memory.outside += MIB
    assert (graphs.size, memory.reads) == (9 * MIB, 1)


def test_on_a_cpu_nothing_is_counted() -> None:
    graphs = GraphBytes(None)
    with graphs.capturing(None):
        pass
    assert graphs.size == 0
