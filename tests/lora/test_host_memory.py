"""The host tier's memory: no two adapters share a byte, and pages come back when an adapter is gone and not read."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import mmap
import random
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coserve.core.errors import CorruptAdapter, RequestOutOfMemory
from coserve.core.types import AdapterDigests, AdapterRef, LoraSettings
from coserve.kernels.lora.types import LoraPair
from coserve.lora.store.entry import State
from coserve.lora.store.host_memory import NO_HUGE_PAGES, PAGE, HostBlock, HostMemory
from coserve.lora.store.packing import PartedSites, packed_bytes
from coserve.lora.store.store import AdapterStore
from coserve.model.lora import LoraWeights
from tests.support.examples import examples

PAGES = 6


class Copy:
    """Stands for the event behind a GPU's copy."""

    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.ended = True


def pages_of(block: HostBlock) -> set[int]:
    """Addresses of the pages."""
    return {part.data_ptr() + at for part in block.parts for at in range(0, len(part), PAGE)}


def taken(size: int) -> int:
    return -(-size // PAGE)


class Machine(RuleBasedStateMachine):
    """Against a plain count of pages. Each adapter's bytes are marks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.marks = HostMemory(PAGES * PAGE + 5, for_kernels=True), 0
        self.held = dict[int, tuple[HostBlock, int, bool]]()
        self.copies = list[Copy]()
        self.gone = list[tuple[set[int], list[Any]]]()

    @rule(size=st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE - 7, 7 * PAGE]))
    def take(self, size: int) -> None:
        fits, outside = size <= self.memory.free_bytes, self.memory.outside
        block = self.memory.allocate(size)
        assert sum(map(len, block.parts)) == size
        assert (self.memory.outside == outside) == fits
        for pages, copies in self.gone:
            if pages & pages_of(block):
                assert all(copy.ended or copy in block.after for copy in copies), "a copy reads what is written"
        self.marks += 1
        self.held[self.marks] = block, size, fits
        for part in block.parts:
            part[:: PAGE - 1] = part[-1:] = self.marks % 251

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        self.copies.append(own := Copy())
        self.held[data.draw(st.sampled_from(sorted(self.held)))][0].read.append(cast("torch.cuda.Event", own))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        """As the thread does that will write the adapter; others may take memory before."""
        for event in self.held[data.draw(st.sampled_from(sorted(self.held)))][0].after:
            event.synchronize()

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def copy_ends(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.copies)).ended = True

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block, _, inside = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        if inside:  # else torch keeps the memory until a copy has ended
            self.gone.append((pages_of(block), list(block.read)))

    @invariant()
    def each_has_its_own_bytes_and_no_page_is_lost(self) -> None:
        for mark, (block, _, _) in self.held.items():
            assert all(int(part[0]) == int(part[-1]) == mark % 251 for part in block.parts if len(part))
        used = sum(taken(size) for _, size, inside in self.held.values() if inside)
        assert self.memory.free_bytes == (PAGES - used) * PAGE


Machine.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)
TestHostMemory = Machine.TestCase


def test_memory_without_a_page_holds_nothing() -> None:
    memory = HostMemory(PAGE - 1, for_kernels=True)
    assert memory.free_bytes == 0
    assert memory.notes == ()
    assert [len(part) for part in memory.allocate(10).parts] == [10] and memory.outside == 1
    assert "adapters in use fill host_adapter_bytes" in memory.notes[0]


class FakeCuda:
    """Registers memory as CUDA does; a slice that it unregisters must still be mapped."""

    def __init__(self) -> None:
        self.registered = dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.registered[address] = size
        return flags

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        assert ctypes.string_at(address, self.registered.pop(address))[:1] in (b"\x00", b"\x07")


def test_memory_is_unpinned_when_the_last_adapter_in_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else CUDA refuses later allocations at its addresses ("resource already mapped")."""
    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    memory = HostMemory(2 * PAGE, for_kernels=True)
    memory.pin(lambda: None).join()
    block = memory.allocate(PAGE)
    block.parts[0].fill_(7)
    assert sum(cuda.registered.values()) == 2 * PAGE
    del memory
    gc.collect()
    assert cuda.registered and int(block.parts[0][0]) == 7
    del block
    gc.collect()
    assert not cuda.registered


WIDTH = 1 << 14


def valued(value: float, rank: int) -> LoraWeights:
    """128 KiB a rank."""
    pair = LoraPair(torch.full((rank, WIDTH), value), torch.full((WIDTH, rank), value), 1.0)
    return LoraWeights(LoraSettings(r=rank), {"q": pair})


def has_its_value(store: AdapterStore, ref: AdapterRef) -> bool:
    sites = store.host_weights(ref).sites
    assert isinstance(sites, PartedSites)
    return all(bool((part.view(torch.float32)[::97] == float(ref.id)).all()) for part in sites.parts)


async def test_random_loads_evictions_cancels_and_failing_reads_mix_nothing_and_leak_nothing() -> None:
    chance, refs, threads = random.Random(0), [AdapterRef(str(i), 1) for i in range(9)], {*threading.enumerate()}
    memory = HostMemory(2 * PAGES * PAGE, for_kernels=False)

    def load(ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        if chance.random() < 0.2:
            raise CorruptAdapter(f"adapter {ref} is broken for now")
        return valued(float(ref.id), rank=1 + 6 * int(ref.id) % 20)

    store, changed = AdapterStore(load, 2 * PAGES * PAGE, memory=memory), asyncio.Event()
    store.notify(changed.set)
    held = list[AdapterRef]()
    for _ in range(200):
        ref = chance.choice(refs)
        if not store.ready(ref):
            while chance.random() < 0.9 and store.reading(ref):
                await changed.wait()
                changed.clear()
            if store.state(ref) is State.HOST:
                store.acquire(ref)
                held.append(ref)
            store.waited(ref)
        assert all(has_its_value(store, own) for own in held)
        while len(held) > 2:
            store.release(held.pop(chance.randrange(len(held))))
    for own in held:
        store.release(own)
    while any(store.state(ref) is State.READING for ref in refs):
        await changed.wait()
        changed.clear()
    inside = sum(taken(packed_bytes(valued(0.0, 1 + 6 * int(ref.id) % 20))) for ref in store.resident())
    async with asyncio.timeout(60):
        # a thread that has just read may still hold its block, and tells nobody when it lets it go
        while memory.free_bytes != (2 * PAGES - inside) * PAGE:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert memory.outside == 0, "those that are idle have left for those that came"
    for ref in refs:
        store.drop(ref)
    store.close()
    for thread in {*threading.enumerate()} - threads:  # as above
        thread.join()
    assert memory.free_bytes == 2 * PAGES * PAGE and store.host_bytes == 0


async def test_a_publication_finds_room_though_idle_adapters_fill_the_memory() -> None:
    memory = HostMemory(4 * PAGES * PAGE, for_kernels=False)
    store = AdapterStore(lambda ref, digests: valued(float(ref.id), rank=12), 4 * PAGES * PAGE, memory=memory)
    for i in range(3 * PAGES):
        store.acquire(AdapterRef(str(i), 1))
        store.release(AdapterRef(str(i), 1))
    for version in (2, 3):
        published = AdapterRef("5", version)
        store.publish(published, await asyncio.to_thread(store.host_copy, valued(5.0, rank=12)))
        assert has_its_value(store, published)
    assert (memory.outside, memory.notes) == (0, ())
    store.close()


async def test_a_request_whose_adapter_has_no_room_beside_those_in_use_fails_alone() -> None:
    size = packed_bytes(valued(0.0, rank=12))
    memory = HostMemory(taken(size) * PAGE, for_kernels=False, most_outside=size)
    store, changed = AdapterStore(lambda ref, _: valued(float(ref.id), rank=12), size, memory=memory), asyncio.Event()
    store.notify(changed.set)
    refs = [AdapterRef(str(i), 1) for i in range(3)]
    for ref in refs:
        assert not store.ready(ref)
        while store.reading(ref):
            await changed.wait()
            changed.clear()
        if ref != refs[-1]:
            store.acquire(ref)
            store.waited(ref)
    failure = store.failure(refs[-1])
    assert isinstance(failure, RequestOutOfMemory) and f"{size} of the {size} bytes" in str(failure)
    store.waited(refs[-1])
    store.release(refs[0])
    assert not store.ready(refs[-1])
    while store.reading(refs[-1]):
        await changed.wait()
        changed.clear()
    store.acquire(refs[-1])
    assert has_its_value(store, refs[-1]) and has_its_value(store, refs[1])
    store.close()


async def test_memory_for_an_adapter_without_room_is_allocated_where_files_are_read() -> None:
    """Pinning it takes a millisecond for some MB, in which no step could be launched."""
    threads = list[str]()

    class Watched(HostMemory):
        def allocate(self, size: int) -> HostBlock:
            threads.append(threading.current_thread().name)
            return super().allocate(size)

    size = packed_bytes(valued(0.0, rank=12))
    memory = Watched(taken(size) * PAGE, for_kernels=False)
    store, changed = AdapterStore(lambda ref, _: valued(float(ref.id), rank=12), size, memory=memory), asyncio.Event()
    store.notify(changed.set)
    for i in range(2):
        assert not store.ready(AdapterRef(str(i), 1))
    while any(store.reading(AdapterRef(str(i), 1)) for i in range(2)):
        await changed.wait()
        changed.clear()
    assert memory.outside == 1 and all(name.startswith("adapters") for name in threads), threads
    for i in range(2):
        store.waited(AdapterRef(str(i), 1))
    store.close()


def test_memory_is_not_reserved_before_it_is_used() -> None:
    """Or a process with much of it could not fork."""
    size = 200 * (2 << 20)
    gc.collect()  # mappings of earlier tests
    before = _unreserved()
    memory = HostMemory(size, for_kernels=False)
    assert _unreserved() - before >= size
    del memory


def test_a_kernel_without_huge_pages_has_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Without)
    memory = HostMemory(PAGE, for_kernels=True)
    assert memory.in_pages(PAGE) is not None
    assert memory.notes == (NO_HUGE_PAGES,)


def _unreserved() -> int:
    """Bytes of this process's mappings for which no memory is set aside."""
    found = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:") and "nr" in line.split():
            found += size
    return found


def test_adapters_that_find_no_room_are_bounded() -> None:
    memory = HostMemory(PAGE, for_kernels=False, most_outside=2 * PAGE)
    inside, one, two = (memory.allocate(PAGE) for _ in range(3))
    with pytest.raises(MemoryError, match=f"and {2 * PAGE} bytes beside it; 7 of the 7 bytes of this one are missing"):
        memory.allocate(7)
    assert memory.outside == 2
    del one
    gc.collect()
    assert len(memory.allocate(PAGE).parts[0]) == PAGE
    assert len(memory.allocate(0).parts) <= 1 and inside.parts and two.parts
