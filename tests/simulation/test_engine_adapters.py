"""Adapters are read while other requests run: a request joins the batch when its adapter is read, and no other
waits."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from coserve.core.errors import AdapterNotFound, StorageBusy
from coserve.core.link.engine import DropAdapter
from coserve.core.link.generation import Admitted, CancelRequest, RequestFailed
from coserve.core.link.link import FromEngine
from coserve.core.link.stats import EngineStats
from coserve.core.types import AdapterDigests, AdapterRef, LoraSettings
from coserve.lora.store.entry import State
from coserve.lora.store.store import AdapterStore
from coserve.model.lora import LoraWeights
from coserve.queues.policies.paper import Ets
from coserve.queues.policy import Policy
from coserve.state.retries import Backoff
from tests.support.fake_ports import FREE, FakeGenerator, Meter, NoAdapters
from tests.support.job_scene import ask, ended
from tests.support.local_engine import Api, running_engine

COLD, OTHER = AdapterRef("cold", 1), AdapterRef("other", 1)


class Disk:
    """Adapter files that are read when the test says so."""

    def __init__(self) -> None:
        self.lost: set[AdapterRef] = set()
        self.busy = 0
        """Reads that fail for a machine that has no descriptors."""
        self.go, self.begun = threading.Event(), threading.Event()
        self.reads: list[AdapterRef] = []
        self.thread = threading.get_ident()

    def __call__(self, ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        assert threading.get_ident() != self.thread, "files are read on threads"
        self.reads.append(ref)
        self.begun.set()
        self.go.wait()
        if self.busy:
            self.busy -= 1
            raise StorageBusy("no descriptors")
        if ref in self.lost:
            raise AdapterNotFound(f"adapter {ref} has no files")
        return LoraWeights(LoraSettings(), {})


@dataclass
class Scene:
    disk: Disk
    store: AdapterStore
    api: Api
    seen: list[FromEngine]

    async def until(self, wanted: Callable[[FromEngine], bool]) -> list[FromEngine]:
        """What comes up to the first such message."""
        found: list[FromEngine] = []
        while not found or not wanted(found[-1]):
            found.append(await self.api.receive())
        self.seen += found
        return found

    async def reading(self) -> None:
        await asyncio.to_thread(self.disk.begun.wait)


@asynccontextmanager
async def scene(policy: Policy | None = None, max_running: int = 4, disk: Disk | None = None) -> AsyncIterator[Scene]:
    disk = disk or Disk()
    store = AdapterStore(disk, 1 << 40)
    generator = FakeGenerator(Meter(), FREE, 64, random.Random(0), 0.0, max_running=max_running, store=store)
    try:
        async with running_engine(generator, policy=policy, adapters=store) as api:
            yield Scene(disk, store, api, [])
    finally:
        disk.go.set()


def admitted(messages: list[FromEngine]) -> list[str]:
    return [message.id for message in messages if isinstance(message, Admitted)]


async def test_others_are_served_while_an_adapter_is_read() -> None:
    async with scene() as at:
        at.api.send(ask("cold", adapter=COLD))
        await at.reading()
        at.api.send(ask("bare", 50))
        before = await at.until(ended("bare"))
        assert admitted(before) == ["bare"]
        at.disk.go.set()
        assert admitted(await at.until(ended("cold"))) == ["cold"]


async def test_two_who_want_the_same_wait_for_one_reading() -> None:
    async with scene() as at:
        for id in ("first", "second"):
            at.api.send(ask(id, adapter=COLD))
        await at.reading()
        at.disk.go.set()
        await at.until(ended("second"))
        assert admitted(at.seen) == ["first", "second"]
        assert at.disk.reads == [COLD]
        at.api.send(ask("third", adapter=COLD))
        await at.until(ended("third"))
        assert at.disk.reads == [COLD]


async def test_who_waits_takes_room_and_is_counted() -> None:
    async with scene(max_running=1) as at:
        at.api.send(ask("cold", adapter=COLD))
        await at.reading()
        at.api.send(ask("bare"))
        await at.until(lambda message: isinstance(message, EngineStats) and message.waiting == 2)
        at.disk.go.set()
        await at.until(ended("bare"))
        assert admitted(at.seen) == ["cold", "bare"]


async def test_an_adapter_is_read_while_its_request_is_queued() -> None:
    async with scene(max_running=1) as at:
        at.api.send(ask("cold", adapter=COLD))
        await at.reading()
        at.disk.begun.clear()
        at.api.send(ask("queued", adapter=OTHER))
        await at.reading()
        at.disk.go.set()
        await at.until(ended("queued"))
        assert at.disk.reads == [COLD, OTHER]


async def test_who_is_cancelled_while_waiting_is_never_let_in() -> None:
    async with scene() as at:
        at.api.send(ask("cold", adapter=COLD))
        await at.reading()
        at.api.send(CancelRequest(id="cold"))
        at.api.send(ask("bare"))
        await at.until(ended("bare"))
        at.disk.go.set()
        at.api.send(ask("later", adapter=COLD))
        await at.until(ended("later"))
        assert admitted(at.seen) == ["bare", "later"]


async def test_an_adapter_without_files_fails_its_request_alone() -> None:
    async with scene() as at:
        at.disk.lost.add(COLD)
        at.disk.go.set()
        at.api.send(ask("cold", adapter=COLD))
        failed = (await at.until(lambda message: isinstance(message, RequestFailed)))[-1]
        assert isinstance(failed, RequestFailed)
        assert (failed.id, failed.code) == ("cold", AdapterNotFound.code)
        at.api.send(ask("bare"))
        await at.until(ended("bare"))


async def test_a_machine_that_is_busy_is_tried_again_and_told() -> None:
    async with scene() as at:
        at.disk.busy = 3
        at.disk.go.set()
        at.api.send(ask("cold", adapter=COLD))
        await at.until(lambda message: isinstance(message, EngineStats) and bool(message.troubles))
        await at.until(ended("cold"))
        assert at.disk.reads == [COLD] * 4
        await at.until(lambda message: isinstance(message, EngineStats) and not message.troubles)


async def test_a_machine_that_stays_busy_fails_the_request_alone() -> None:
    async def sleep(_: float) -> None:
        await asyncio.sleep(0)

    disk, changed = Disk(), asyncio.Event()
    disk.go.set()
    disk.busy = 1000
    store = AdapterStore(disk, 1 << 40, backoff=Backoff(first=1.0, total=3.0), sleep=sleep)
    store.notify(changed.set)
    assert not store.ready(COLD)
    assert store.state(COLD) is State.READING
    while store.reading(COLD):
        await changed.wait()
        changed.clear()
    assert isinstance(store.failure(COLD), StorageBusy)
    store.waited(COLD)
    assert store.state(COLD) is State.DISK
    store.close()


async def test_what_is_deleted_while_it_is_read_is_not_kept() -> None:
    async with scene() as at:
        at.api.send(ask("cold", adapter=COLD))
        await at.reading()
        at.api.send(DropAdapter(ref=COLD))
        at.api.send(ask("bare"))
        await at.until(ended("bare"))
        at.disk.go.set()
        await at.until(lambda message: isinstance(message, RequestFailed) and message.id == "cold")
        assert at.store.state(COLD) is State.DISK


async def test_the_end_does_not_wait_for_files() -> None:
    async with scene() as at:
        at.api.send(ask("cold", adapter=COLD))
        await at.reading()
    assert admitted(at.seen) == []


@pytest.mark.parametrize("size", [1, 4])
async def test_batches_that_run_to_their_end_wait_for_their_adapters(size: int) -> None:
    async with scene(Ets(size, 0.0), max_running=1) as at:
        at.api.send(ask("cold", adapter=COLD))
        await at.reading()
        at.api.send(ask("other", adapter=OTHER))
        at.disk.go.set()
        await at.until(ended("other"))
        assert admitted(at.seen) == ["cold", "other"]


async def test_a_fault_in_reading_ends_that_request_alone() -> None:
    class Faulty(Disk):
        def __call__(self, ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
            super().__call__(ref, digests)
            raise ZeroDivisionError

    async with scene(disk=Faulty()) as at:
        at.disk.go.set()
        at.api.send(ask("cold", adapter=COLD))
        await at.reading()
        failed = (await at.until(lambda message: isinstance(message, RequestFailed)))[-1]
        assert isinstance(failed, RequestFailed) and (failed.id, failed.code) == ("cold", "internal_error")
        at.api.send(ask("bare"))
        await at.until(ended("bare"))


async def test_who_was_let_in_is_admitted_when_it_starts_and_waits_until_then() -> None:
    """Its adapter was evicted between."""
    generator, adapters = FakeGenerator(Meter(), FREE, 64, random.Random(0), 0.0), NoAdapters()
    generator.adapters.lost = True
    async with running_engine(generator, adapters=adapters) as api:
        api.send(ask("late", adapter=COLD))
        while not (isinstance(message := await api.receive(), EngineStats) and message.waiting):
            assert not isinstance(message, Admitted)
        assert (message.waiting, message.running) == (1, 0)
        generator.adapters.lost = False
        adapters.changed()
        assert isinstance(await api.receive(), Admitted)
        while not ended("late")(await api.receive()):
            pass
