"""Residency: whoever holds an adapter keeps it, idle ones go by age, a deleted one is never handed out again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coserve.adapter_store.host import Residency
from coserve.errors import AdapterBusy, AdapterNotFound
from coserve.model.lora import LoraWeights
from coserve.types import AdapterRef, LoraSettings

REFS = [AdapterRef(id, version) for id in "abc" for version in (1, 2)]
CAPACITY = 3


class Disk:
    """Stands for the adapters' files; counts reads."""

    def __init__(self, *refs: AdapterRef) -> None:
        self.files = set(refs)
        self.reads: list[AdapterRef] = []

    def __call__(self, ref: AdapterRef) -> LoraWeights:
        if ref not in self.files:
            raise AdapterNotFound(f"adapter {ref} does not exist")
        self.reads.append(ref)
        return LoraWeights(LoraSettings(), {})


def test_the_least_recently_used_idle_adapter_goes_first() -> None:
    disk = Disk(*REFS)
    residency = Residency(disk, capacity=2)
    for ref in (REFS[0], REFS[1], REFS[0], REFS[2]):
        residency.acquire(ref)
        residency.release(ref)
    assert residency.resident() == (REFS[0], REFS[2])
    residency.acquire(REFS[0])
    assert disk.reads == [REFS[0], REFS[1], REFS[2]]


def test_held_adapters_stay_beyond_the_capacity_until_released() -> None:
    residency = Residency(Disk(*REFS), capacity=1)
    held = {ref: residency.acquire(ref) for ref in REFS[:3]}
    assert set(residency.resident()) == set(REFS[:3])
    assert all(residency.acquire(ref) is weights for ref, weights in held.items())
    for ref in (*REFS[:3], *REFS[:3]):
        residency.release(ref)
    assert len(residency.resident()) == 1


def test_a_published_adapter_is_never_read() -> None:
    disk = Disk()
    residency = Residency(disk, capacity=2)
    weights = LoraWeights(LoraSettings(), {})
    residency.publish(REFS[0], weights)
    assert residency.acquire(REFS[0]) is weights
    assert disk.reads == []
    with pytest.raises(AdapterBusy):
        residency.publish(REFS[0], LoraWeights(LoraSettings(), {}))


def test_a_deleted_adapter_leaves_with_its_last_holder() -> None:
    disk = Disk(REFS[0])
    residency = Residency(disk, capacity=2)
    residency.acquire(REFS[0])
    residency.drop(REFS[0])
    disk.files.clear()
    assert residency.resident() == ()
    with pytest.raises(AdapterNotFound):
        residency.acquire(REFS[0])
    residency.release(REFS[0])
    with pytest.raises(AdapterNotFound):
        residency.acquire(REFS[0])


def test_an_unknown_adapter_costs_nobody_a_place_for_good() -> None:
    residency = Residency(Disk(REFS[0]), capacity=1)
    residency.acquire(REFS[0])
    with pytest.raises(AdapterNotFound):
        residency.acquire(REFS[1])
    assert residency.resident() == (REFS[0],)


class ResidencyMachine(RuleBasedStateMachine):
    """Against a plain model: who holds what, and which files exist."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.residency = Residency(self.disk, CAPACITY)
        self.held: dict[AdapterRef, list[LoraWeights]] = {}
        self.read_ones: dict[AdapterRef, Callable[[], None]] = {}
        """Read, and not kept yet."""

    @rule(ref=st.sampled_from(REFS))
    def publish(self, ref: AdapterRef) -> None:
        weights = LoraWeights(LoraSettings(), {})
        if ref in self.held:
            with pytest.raises(AdapterBusy):
                self.residency.publish(ref, weights)
        else:
            self.residency.publish(ref, weights)
            self.disk.files.add(ref)
            assert ref in self.residency.resident()

    @rule(ref=st.sampled_from(REFS))
    def acquire(self, ref: AdapterRef) -> None:
        if ref not in self.disk.files:
            with pytest.raises(AdapterNotFound):
                self.residency.acquire(ref)
            return
        reads = len(self.disk.reads)
        resident = ref in self.residency.resident()
        weights = self.residency.acquire(ref)
        assert (len(self.disk.reads) == reads) == resident
        assert all(weights is other for other in self.held.get(ref, ()))
        self.held.setdefault(ref, []).append(weights)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(sorted(self.held)))
        self.residency.release(ref)
        self.held[ref].pop()
        if not self.held[ref]:
            del self.held[ref]

    @rule(ref=st.sampled_from(REFS))
    def drop(self, ref: AdapterRef) -> None:
        self.disk.files.discard(ref)
        self.residency.drop(ref)
        self.read_ones.pop(ref, None)  # as who reads has to
        assert ref not in self.residency.resident()

    @rule(ref=st.sampled_from(REFS))
    def read(self, ref: AdapterRef) -> None:
        before = self.residency.resident()
        if ref in self.disk.files:
            self.read_ones[ref] = self.residency.read(ref)
        else:
            with pytest.raises(AdapterNotFound):
                self.residency.read(ref)
        assert self.residency.resident() == before, "nothing is kept by reading"

    @precondition(lambda self: self.read_ones)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(sorted(self.read_ones)))
        missing = self.residency.missing(ref)
        assert missing == (ref not in self.residency.resident())
        self.read_ones.pop(ref)()
        assert not self.residency.missing(ref)

    @invariant()
    def what_is_held_is_resident_and_the_rest_is_bounded(self) -> None:
        resident = set(self.residency.resident())
        assert resident <= self.disk.files
        assert {ref for ref in self.held if ref in self.disk.files} <= resident
        assert len(resident) <= max(CAPACITY, len(self.held) + 1)  # + 1: just published


ResidencyMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestResidency = ResidencyMachine.TestCase
