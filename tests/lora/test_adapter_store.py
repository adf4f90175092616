"""The adapter store: an acquired adapter stays, idle ones are evicted by age, a deleted one is never acquired again."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coserve.core.errors import AdapterBusy, AdapterNotFound, RequestOutOfMemory
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.lora.store.entry import State
from coserve.lora.store.interfaces import CopyMirror
from coserve.lora.store.store import READ_AHEAD, READERS, AdapterStore
from coserve.memory.buffer import ALIGNMENT, PageBuffer
from coserve.model.lora import LoraWeights
from tests.support.examples import examples
from tests.support.sized_adapters import RANK_BYTES, room_for, sized

REFS = [AdapterRef(id, version) for id in "abc" for version in (1, 2)]
CAPACITY = 3


class Disk:
    """Stands for the adapters' files; counts reads."""

    def __init__(self, *refs: AdapterRef) -> None:
        self.files = set(refs)
        self.reads: list[AdapterRef] = []

    def __call__(self, ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        if ref not in self.files:
            raise AdapterNotFound(f"adapter {ref} does not exist")
        self.reads.append(ref)
        return sized()


def test_the_least_recently_used_idle_adapter_goes_first() -> None:
    disk = Disk(*REFS)
    store = AdapterStore(disk, room_for(2))
    for ref in (REFS[0], REFS[1], REFS[0], REFS[2]):
        store.acquire(ref)
        store.release(ref)
    assert store.resident() == (REFS[0], REFS[2])
    store.acquire(REFS[0])
    assert disk.reads == [REFS[0], REFS[1], REFS[2]]


def test_held_adapters_stay_beyond_the_capacity_until_released() -> None:
    store = AdapterStore(Disk(*REFS), room_for(1))
    held = {ref: store.acquire(ref) for ref in REFS[:3]}
    assert set(store.resident()) == set(REFS[:3])
    assert all(store.acquire(ref) is weights for ref, weights in held.items())
    for ref in (*REFS[:3], *REFS[:3]):
        store.release(ref)
    assert len(store.resident()) == 1


class Mirror(CopyMirror):
    """Remembers which adapters lost their host copies."""

    def __init__(self) -> None:
        self.gone = list[AdapterRef]()

    def dropped(self, ref: AdapterRef) -> None:
        self.gone.append(ref)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_copy_that_was_read_elsewhere_goes_when_the_read_fails_here(waits: bool) -> None:
    """On another rank for instance, whose memory did not run out."""
    mirror = Mirror()

    def fails(ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        raise MemoryError

    store = AdapterStore(fails, room_for(2), mirror=mirror)
    if waits:
        changed = asyncio.Event()
        store.notify(changed.set)
        assert not store.ready(REFS[0])
        await changed.wait()
        assert isinstance(store.failure(REFS[0]), RequestOutOfMemory)
        store.waited(REFS[0])
    else:
        with pytest.raises(RequestOutOfMemory, match="no host memory for adapter a@1"):
            store.acquire(REFS[0])
    assert set(mirror.gone) == {REFS[0]}


def test_a_temporary_adapter_stays_until_it_is_dropped_and_counts() -> None:
    """It has no files to be read again from."""
    disk, snapshot = Disk(*REFS), AdapterRef("job-1:snapshot", 1)
    store = AdapterStore(disk, room_for(2))
    store.publish(snapshot, weights := sized(), temporary=True)
    for ref in REFS:
        store.acquire(ref)
        store.release(ref)
    assert store.acquire(snapshot) is weights
    assert store.resident() == (REFS[-1],), "the budget of two holds the temporary one too, which nobody can ask for"
    store.drop(snapshot)
    with pytest.raises(AdapterNotFound):
        store.acquire(snapshot)
    store.release(snapshot)
    assert store.state(snapshot) is State.DISK
    for ref in REFS[:2]:
        store.acquire(ref)
        store.release(ref)
    assert store.resident() == tuple(REFS[:2])
    assert snapshot not in disk.reads


def test_an_unknown_adapter_costs_nobody_a_place_for_good() -> None:
    store = AdapterStore(Disk(REFS[0]), room_for(1))
    store.acquire(REFS[0])
    with pytest.raises(AdapterNotFound):
        store.acquire(REFS[1])
    assert store.resident() == (REFS[0],)


def test_the_budget_counts_bytes() -> None:
    store = AdapterStore(Disk(*REFS), room_for(4))
    for ref, rank in zip(REFS[:4], (1, 1, 1, 2), strict=True):
        store.publish(ref, sized(rank))
    assert store.resident() == (REFS[1], REFS[2], REFS[3])
    store.publish(REFS[4], sized(3))
    assert store.resident() == (REFS[4],)
    store.publish(REFS[5], sized(9))
    assert store.resident() == (REFS[5],), "what was just published stays until something else comes"


async def settled(store: AdapterStore, refs: Sequence[AdapterRef] = REFS) -> None:
    """Until every read has ended."""
    changed = asyncio.Event()
    store.notify(changed.set)
    while any(store.state(ref) is State.READING for ref in refs):
        await changed.wait()
        changed.clear()


async def test_what_somebody_waits_for_is_not_evicted_before_they_have_it() -> None:
    disk = Disk(*REFS)
    store = AdapterStore(disk, room_for(1))
    for ref in REFS[:3]:
        assert not store.ready(ref) and store.reading(ref)
    await settled(store)
    assert set(store.resident()) == set(REFS[:3])
    store.waited(REFS[1])
    for ref in (REFS[0], REFS[2]):
        assert not store.reading(ref)
        store.acquire(ref)
        store.waited(ref)
        store.release(ref)
    assert len(store.resident()) == 1
    assert sorted(disk.reads) == sorted(REFS[:3])
    store.close()


async def test_what_nobody_waits_for_any_more_goes_at_once() -> None:
    """The request was cancelled before it acquired the adapter."""
    mirror = Mirror()
    store = AdapterStore(Disk(*REFS), room_for(1), mirror=mirror)
    store.acquire(REFS[0])
    assert not store.ready(REFS[1])
    await settled(store)
    assert store.state(REFS[1]) is State.HOST
    store.waited(REFS[1])
    assert store.state(REFS[1]) is State.DISK
    assert store.resident() == (REFS[0],)
    assert set(mirror.gone) == {REFS[1]}
    store.close()


async def test_a_prefetched_adapter_is_idle_and_a_prefetch_that_fails_leaves_nothing() -> None:
    disk = Disk(*REFS[:3])
    store = AdapterStore(disk, room_for(2))
    for ref in (REFS[0], REFS[1], REFS[1], REFS[5]):
        store.prefetch(ref)
    await settled(store)
    assert set(store.resident()) == set(REFS[:2])
    assert sorted(disk.reads) == sorted(REFS[:2])
    store.prefetch(REFS[2])
    await settled(store)
    assert len(store.resident()) == 2
    assert REFS[2] in store.resident()
    store.close()


async def test_a_pinned_adapter_is_read_and_stays() -> None:
    store = AdapterStore(Disk(*REFS), room_for(2))
    store.pin(REFS[0], pinned=True)
    await settled(store)
    for ref in REFS[1:]:
        store.acquire(ref)
        store.release(ref)
    assert set(store.resident()) == {REFS[0], REFS[-1]}
    store.pin(REFS[0], pinned=False)
    for ref in REFS[1:3]:
        store.acquire(ref)
        store.acquire(ref)
        store.release(ref)
        store.release(ref)
    assert REFS[0] not in store.resident()
    store.close()


async def test_what_a_request_waits_for_is_read_before_prefetches() -> None:
    disk = Disk(*REFS)
    store = AdapterStore(disk, room_for(9))
    for ref in REFS[:5]:
        store.prefetch(ref)
    assert not store.ready(REFS[5])
    await settled(store)
    assert disk.reads.index(REFS[5]) < 4, "two were being read, and reads begin as earlier ones end"
    store.waited(REFS[5])
    assert set(store.resident()) == set(REFS)
    store.close()


async def test_arrivals_do_not_have_adapters_read_long_before_their_turn() -> None:
    go, refs = threading.Event(), [AdapterRef("many", version) for version in range(1, 40)]

    def load(ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        go.wait()
        return sized()

    store = AdapterStore(load, room_for(99))
    for ref in refs:
        store.arrived(ref)
        await asyncio.sleep(0)
    read = [ref for ref in refs if store.state(ref) is State.READING]
    assert read == refs[: READERS + READ_AHEAD]
    go.set()
    await settled(store, refs)
    assert set(store.resident()) == set(read)
    store.close()


async def test_who_waits_for_a_deleted_adapter_fails_read_or_not() -> None:
    store = AdapterStore(Disk(*REFS), room_for(2))
    assert not store.ready(REFS[0])
    await settled(store)
    assert not store.ready(REFS[1])
    for ref in REFS[:2]:
        store.drop(ref)
    await settled(store)
    for ref in REFS[:2]:
        with pytest.raises(AdapterNotFound):
            store.acquire(ref)
        store.waited(ref)
        assert store.state(ref) is State.DISK
    assert store.resident() == ()
    store.close()


async def test_an_adapter_that_is_published_while_it_is_read_serves_at_once() -> None:
    mirror, ended = Mirror(), asyncio.Event()
    store = AdapterStore(Disk(), room_for(2), mirror=mirror)
    store.notify(ended.set)
    assert not store.ready(REFS[0])
    store.publish(REFS[0], sized(1))
    assert not store.reading(REFS[0])
    await ended.wait()
    assert store.failure(REFS[0]) is None
    assert not mirror.gone, "the read failed, but there is a copy"
    store.waited(REFS[0])
    assert store.resident() == (REFS[0],)
    store.close()


def store_with_pages(disk: Disk, pages: int = 8) -> tuple[AdapterStore, PageBuffer]:
    """Of one idle adapter on the host. `sized(1)` takes a page."""
    store, buffer = AdapterStore(disk, room_for(1)), PageBuffer(pages, 2 * ALIGNMENT, torch.device("cpu"))
    store.use_pool(buffer, lambda ref: None)
    return store, buffer


def run_once(store: AdapterStore, ref: AdapterRef) -> None:
    """As a request does that starts at once."""
    store.acquire(ref)
    assert store.activate(ref) is not None
    store.deactivate(ref)
    store.release(ref)


async def test_the_gpu_copy_outlives_the_host_copy_and_serves_without_it() -> None:
    disk = Disk(REFS[0])
    store, _ = store_with_pages(disk)
    store.publish(REFS[0], sized(1))
    run_once(store, REFS[0])
    store.publish(REFS[1], sized(1))  # evicts the host copy of the first
    assert store.state(REFS[0]) is State.GPU
    assert set(store.resident()) == set(REFS[:2])
    assert store.ready(REFS[0]), "it need not wait for the disk"
    assert disk.reads == []
    run_once(store, REFS[0])
    store.close()


async def test_a_request_that_leaves_waits_for_pages_no_longer() -> None:
    store, _ = store_with_pages(Disk())
    store.publish(REFS[0], sized(1))
    store.acquire(REFS[0])
    store.lacks_pages(REFS[0])
    store.release(REFS[0])  # cancelled
    run_once(store, REFS[0])
    assert {each.cause: each.count for each in store.times.totals()}["pages"] == 0
    store.acquire(REFS[0])
    store.lacks_pages(REFS[0])
    run_once(store, REFS[0])
    assert {each.cause: each.count for each in store.times.totals()}["pages"] == 1
    store.close()


async def test_a_request_that_lost_the_gpu_copy_goes_on_from_the_host_copy_that_was_read_meanwhile() -> None:
    disk = Disk(REFS[0])
    store, buffer = store_with_pages(disk)
    store.publish(REFS[0], sized(1))
    run_once(store, REFS[0])
    store.publish(REFS[1], sized(1))
    assert store.ready(REFS[0])
    store.acquire(REFS[0])
    taken = buffer.pool.allocate(8)
    assert taken is not None
    buffer.pool.free(taken)
    assert store.state(REFS[0]) is State.READING
    assert store.activate(REFS[0]) is None
    await until_read(store)
    assert disk.reads == [REFS[0]]
    assert store.activate(REFS[0]) is not None
    store.deactivate(REFS[0])
    store.release(REFS[0])
    store.close()


async def test_a_request_whose_last_copy_is_gone_is_told_why() -> None:
    store, buffer = store_with_pages(Disk())
    store.publish(REFS[0], sized(1))
    run_once(store, REFS[0])
    store.publish(REFS[1], sized(1))
    assert store.ready(REFS[0])
    store.acquire(REFS[0])
    await until_read(store)
    assert store.failure(REFS[0]) is None
    assert store.activate(REFS[0]) is not None, "it still has pages"
    store.deactivate(REFS[0])
    buffer.pool.allocate(8)
    assert isinstance(store.failure(REFS[0]), AdapterNotFound)
    store.release(REFS[0])
    assert store.state(REFS[0]) is State.DISK
    store.close()


async def test_a_thousand_loads_slow_failing_and_cancelled_leave_nothing() -> None:
    chance, disk, refs = random.Random(0), Disk(*REFS), [*REFS]

    def load(ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        if chance.random() < 0.2:
            raise AdapterNotFound(f"adapter {ref} is gone for now")
        return disk(ref, digests)

    store, buffer = AdapterStore(load, room_for(2)), PageBuffer(8, 2 * ALIGNMENT, torch.device("cpu"))
    store.use_pool(buffer, lambda ref: None)
    for number in range(1000):
        ref = chance.choice(refs)
        waits = not store.ready(ref)
        if waits and chance.random() < 0.9:  # else it is cancelled while it is read
            await settled(store, refs)
        if not waits or (not store.reading(ref) and store.failure(ref) is None):
            run_once(store, ref)
        if waits:
            store.waited(ref)
        if number % 50 == 0:
            store.publish(ref, sized())
        if number % 70 == 0:
            store.drop(ref)
            refs[refs.index(ref)] = later = AdapterRef("later", number + 1)  # no version comes again
            disk.files.add(later)
    await settled(store, refs)
    assert store.host_bytes <= 2 * RANK_BYTES and buffer.pool.used == 0
    for ref in refs:
        store.drop(ref)
    ended = asyncio.Event()
    store.notify(ended.set)
    while store.host_bytes:  # copies of adapters in pages that are read again
        await ended.wait()
        ended.clear()
    assert store.host_bytes == 0 and store.resident() == () and not store.troubles
    store.close()


async def until_read(store: AdapterStore) -> None:
    """Until the first read has ended."""
    changed = asyncio.Event()
    store.notify(changed.set)
    await changed.wait()


class StoreMachine(RuleBasedStateMachine):
    """Against a plain model: who holds what, and which files exist."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.store = AdapterStore(self.disk, room_for(CAPACITY))
        self.held: dict[AdapterRef, list[LoraWeights]] = {}

    @rule(ref=st.sampled_from(REFS))
    def publish(self, ref: AdapterRef) -> None:
        weights = sized()
        if ref in self.held:
            with pytest.raises(AdapterBusy):
                self.store.publish(ref, weights)
        else:
            self.store.publish(ref, weights)
            self.disk.files.add(ref)
            assert ref in self.store.resident()

    @rule(ref=st.sampled_from(REFS))
    def acquire(self, ref: AdapterRef) -> None:
        if ref not in self.disk.files:
            with pytest.raises(AdapterNotFound):
                self.store.acquire(ref)
            return
        reads = len(self.disk.reads)
        resident = ref in self.store.resident()
        weights = self.store.acquire(ref)
        assert (len(self.disk.reads) == reads) == resident
        assert all(weights is other for other in self.held.get(ref, ()))
        self.held.setdefault(ref, []).append(weights)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(sorted(self.held)))
        self.store.release(ref)
        self.held[ref].pop()
        if not self.held[ref]:
            del self.held[ref]

    @rule(ref=st.sampled_from(REFS))
    def drop(self, ref: AdapterRef) -> None:
        self.disk.files.discard(ref)
        self.store.drop(ref)
        assert ref not in self.store.resident()

    @invariant()
    def what_is_held_is_resident_and_the_rest_is_bounded(self) -> None:
        resident = set(self.store.resident())
        assert resident <= self.disk.files
        assert {ref for ref in self.held if ref in self.disk.files} <= resident
        assert len(resident) <= max(CAPACITY, len(self.held) + 1)  # + 1: just published


StoreMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
TestStore = StoreMachine.TestCase
