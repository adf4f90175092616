"""Copies of adapters into pages run beside the step in flight, unless it uses the pages."""

from __future__ import annotations

import pytest
import torch

from coserve.core.types import LoraSettings
from coserve.kernels.lora.types import LoraPair
from coserve.lora.store.host_memory import HostMemory
from coserve.lora.store.packing import PartedSites, packed, packed_bytes
from coserve.lora.store.pages import PageCopies
from coserve.memory.buffer import PageBuffer
from coserve.model.lora import LoraWeights

pytestmark = pytest.mark.gpu

PAGE, LONG = 1 << 20, 400_000_000
"""Bytes of a page, and cycles of a step: some tenths of a second."""


def adapter(value: float) -> LoraWeights:
    pair = LoraPair(torch.full((16, 4096), value), torch.full((4096, 16), value), 1.0)
    memory, weights = (
        HostMemory(0, for_kernels=True),
        packed(LoraWeights(LoraSettings(r=16), {"site": pair}), for_kernels=True),
    )
    return memory.copy(weights, memory.allocate(packed_bytes(weights)))


def is_there(copy: LoraWeights, value: float) -> bool:
    pair = copy.sites["site"]
    return bool((pair.a_RD == value).all() and (pair.b_OR == value).all())


def test_a_copy_into_quiet_pages_ends_before_the_step_in_flight() -> None:
    buffer = PageBuffer(8, PAGE, torch.device("cuda"))
    copies, ended = PageCopies(buffer), torch.cuda.Event()
    host = adapter(3.0)
    copies.copy(host, buffer.allocate_span(1)[0])  # type: ignore[index]
    torch.cuda.synchronize()
    buffer.step_begins()
    torch.cuda._sleep(LONG)
    ended.record()
    taken = buffer.allocate_span(1)
    assert taken is not None and buffer.is_quiet(taken[0])
    copy = copies.copy(host, taken[0])
    assert copies.stream is not None
    copies.stream.synchronize()
    assert not ended.query(), "the step is still running"
    assert is_there(copy, 3.0), "and what comes after the step sees the copy"


def test_a_step_in_flight_reads_the_old_content_of_pages_that_are_used_again() -> None:
    buffer = PageBuffer(2, PAGE, torch.device("cuda"))
    copies = PageCopies(buffer)
    first = buffer.allocate_span(2)
    assert first is not None
    old = copies.copy(adapter(1.0), first[0])
    buffer.step_begins()
    torch.cuda._sleep(LONG)
    read = old.sites["site"].a_RD.clone()
    buffer.pool.release_span(first[0])
    second = buffer.allocate_span(2)
    assert second is not None and not buffer.is_quiet(second[0])
    new = copies.copy(adapter(2.0), second[0])
    assert bool((read == 1.0).all())
    assert is_there(new, 2.0)


def test_memory_of_an_adapter_that_is_gone_is_written_when_its_copy_has_ended() -> None:
    size = packed_bytes(adapter(1.0))
    memory, buffer = HostMemory(PAGE, for_kernels=True), PageBuffer(8, PAGE, torch.device("cuda"))
    memory.pin(lambda: None).join()
    host = memory.copy(adapter(1.0), memory.allocate(size))
    assert isinstance(host.sites, PartedSites) and all(part.is_pinned() for part in host.sites.parts)
    taken = buffer.allocate_span(1)
    assert taken is not None
    torch.cuda._sleep(LONG)  # the copy waits behind it
    gpu = PageCopies(buffer).copy(host, taken[0])
    del host
    assert memory.free_bytes == PAGE
    second = memory.copy(adapter(2.0), memory.allocate(size))
    assert memory.outside == 0
    assert is_there(gpu, 1.0) and is_there(second, 2.0)


def test_memory_of_stores_that_are_gone_is_allocated_again() -> None:
    for _ in range(8):
        memory = HostMemory(64 * PAGE, for_kernels=True)
        memory.pin(lambda: None).join()
        assert memory.notes == ()
        del memory
        assert int(torch.zeros(64 * PAGE, dtype=torch.uint8, device="cuda")[0]) == 0
