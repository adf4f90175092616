"""Adapters in pages: the pages hold the adapter as long as a sequence uses it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coserve.core.types import AdapterRef, LoraSettings
from coserve.kernels.lora.segmented.adapter_table import NO_ENTRY, SlotColumns
from coserve.kernels.lora.types import VECTOR, LoraPair, TableEntry
from coserve.lora.store.entry import Entry
from coserve.lora.store.packing import PackedSites, PartedSites, packed, packed_bytes
from coserve.lora.store.pages import Activated, AdapterPages
from coserve.memory.buffer import ALIGNMENT, PageBuffer
from coserve.model.lora import LoraWeights
from tests.support.examples import examples
from tests.support.sized_adapters import same_adapter

PAGE = 2 * ALIGNMENT
CPU = torch.device("cpu")


def adapter(number: int, rank: int, sites: int = 2, dtype: torch.dtype = torch.float32) -> LoraWeights:
    g = torch.Generator().manual_seed(number)
    pairs = {
        f"site{i}": LoraPair(
            torch.randn(rank, 5, generator=g).to(dtype), torch.randn(7, rank, generator=g).to(dtype), 0.5 + i
        )
        for i in range(sites)
    }
    return LoraWeights(LoraSettings(r=rank), pairs)


def entry(number: int, weights: LoraWeights) -> Entry:
    return Entry(AdapterRef(f"a{number}", 1), host=weights, size=packed_bytes(weights))


def pages_in(buffer: PageBuffer) -> AdapterPages:
    return AdapterPages(buffer, lambda entry: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_in_pages_are_contiguous_and_begin_at_a_line(dtype: torch.dtype) -> None:
    buffer, source = PageBuffer(20, PAGE, CPU), adapter(0, 3, dtype=dtype)
    pages, own = pages_in(buffer), entry(0, source)
    activated = pages.activate(own)
    assert activated is not None
    assert same_adapter(activated.weights, source)
    assert buffer.pool.used == pages.pages(own) == -(-packed_bytes(source) // PAGE)
    for pair in activated.weights.sites.values():
        assert pair.a_RD.is_contiguous()
        assert pair.b_OR.is_contiguous()
        for matrix in (pair.a_RD, pair.b_OR):
            assert (matrix.data_ptr() - buffer.bytes.data_ptr()) % ALIGNMENT == 0


@pytest.mark.parametrize("cut", [3 * PAGE, 96])
def test_a_packed_adapter_goes_over_part_by_part(cut: int) -> None:
    """Its parts may end anywhere."""
    source = adapter(0, 3, sites=4)
    packed_too = packed(source, for_kernels=True)
    assert isinstance(packed_too.sites, PackedSites)
    whole = LoraWeights(source.settings, PartedSites(packed_too.sites.memory_N.split(cut), packed_too.sites.layout))
    assert same_adapter(whole, source) and same_adapter(packed_too, source)
    for pair in whole.sites.values():
        assert pair.b_OR.stride() == (VECTOR, 1)
        assert not pair.b_OR.as_strided((7, VECTOR), (VECTOR, 1))[:, 3:].any(), "rows are padded with zeros"
    activated = pages_in(PageBuffer(40, PAGE, CPU)).activate(entry(0, whole))
    assert activated is not None
    assert same_adapter(activated.weights, source)


@pytest.mark.parametrize("rank", [3, 8])
def test_table_entries_are_those_of_the_pairs(rank: int) -> None:
    """Without views of the matrices: there are hundreds, and a step waits."""
    source = adapter(0, rank, sites=3)
    sites = packed(source, for_kernels=True).sites
    assert isinstance(sites, PackedSites)
    names = ["site2", "other", "site0"]
    expected = [sites.get(name) for name in names]
    entries = [
        NO_ENTRY if pair is None else TableEntry(pair.a_RD.data_ptr(), pair.b_OR.data_ptr(), 0, 0, rank, pair.scaling)
        for pair in expected
    ]
    for _ in range(2):  # the second time from the layout's
        found, own = sites.columns(names), SlotColumns.of(entries)
        assert found.largest == own.largest == rank
        for name in ("addresses", "ranks", "scalings", "scales"):
            assert torch.equal(getattr(found, name), getattr(own, name)), name
    assert sites.columns(["site1"]).addresses.tolist() == [
        [sites["site1"].a_RD.data_ptr(), sites["site1"].b_OR.data_ptr()]
    ]


def test_an_adapter_of_no_sites_has_a_page() -> None:
    activated = pages_in(PageBuffer(2, PAGE, CPU)).activate(entry(0, LoraWeights(LoraSettings(), {})))
    assert activated is not None
    assert activated.weights.sites == {}


def test_it_stays_when_no_sequence_uses_it_until_its_pages_are_needed() -> None:
    buffer, source, evicted = PageBuffer(6, PAGE, CPU), adapter(0, 3), list[Entry]()
    pages, own = AdapterPages(buffer, evicted.append), entry(0, source)
    need = pages.pages(own)
    first = pages.activate(own)
    assert first is not None
    assert pages.needs(own) == 0
    pages.deactivate(own)
    assert (buffer.pool.used, pages.needs(own)) == (0, need)
    again = pages.activate(own)
    assert again is not None
    assert again.weights is first.weights
    pages.deactivate(own)
    assert evicted == []
    others = buffer.pool.allocate(6)
    assert others is not None
    assert evicted == [own]
    assert own.gpu is None
    assert pages.activate(own) is None
    buffer.pool.free(others)
    back = pages.activate(own)
    assert back is not None
    assert same_adapter(back.weights, source)


def test_pages_of_a_dropped_adapter_are_blank() -> None:
    buffer, evicted = PageBuffer(6, PAGE, CPU), list[Entry]()
    pages, own = AdapterPages(buffer, evicted.append), entry(0, adapter(0, 3))
    assert pages.activate(own) is not None
    pages.deactivate(own)
    assert buffer.pool.cached > 0
    pages.drop(own)
    assert (buffer.pool.cached, own.gpu, evicted) == (0, None, [own])
    buffer.pool.check_integrity()


class Machine(RuleBasedStateMachine):
    """Adapters are activated and evicted while pages are allocated, labelled, moved and freed. Marks identify a page's
    owner."""

    @initialize(pages=st.integers(1, 16))
    def start(self, pages: int) -> None:
        self.buffer = PageBuffer(pages, PAGE, CPU)
        self.pages = pages_in(self.buffer)
        self.entries = {number: entry(number, adapter(number, 1 + number % 3, 1 + number % 2)) for number in range(5)}
        self.sources = {number: own.host for number, own in self.entries.items() if own.host is not None}
        self.made = 5
        self.inside: dict[int, list[Activated]] = {}
        self.held: dict[int, list[int]] = {}  # mark -> pages
        self.marks = 0

    @rule(number=st.integers(0, 4))
    def activate(self, number: int) -> None:
        own = self.entries[number]
        need, free = self.pages.needs(own), self.buffer.pool.free_pages
        entered = self.pages.activate(own)
        if entered is None:
            assert need > free or self.inside, "room enough, and no other adapter in the way"
            return
        assert need <= free
        assert self.buffer.pool.free_pages == free - need
        assert all(entered.weights is other.weights for other in self.inside.get(number, ()))
        self.inside.setdefault(number, []).append(entered)
        for pages in self.held.values():
            pages[:] = [entered.moved.get(page, page) for page in pages]

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def deactivate(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.inside)))
        self.pages.deactivate(self.entries[number])
        self.inside[number].pop()
        if not self.inside[number]:
            del self.inside[number]

    @rule(number=st.integers(0, 4))
    def is_no_more(self, number: int) -> None:
        if number not in self.inside:
            self.pages.drop(self.entries[number])
            self.sources[number] = adapter(self.made, 1 + self.made % 4)
            self.entries[number] = entry(number, self.sources[number])
            self.made += 1

    @rule(n=st.integers(1, 6))
    def allocate(self, n: int) -> None:
        pages = self.buffer.pool.allocate(n)
        if pages is not None:
            self.marks += 1
            self.held[self.marks] = pages
            for page in pages:
                self.buffer.bytes[page] = self.marks % 251 + 1
                if page % 2:
                    self.buffer.pool.label(page, f"{self.marks} {page}".encode())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.buffer.pool.free(self.held.pop(data.draw(st.sampled_from(sorted(self.held)))))

    @invariant()
    def nobody_writes_to_what_is_anothers(self) -> None:
        if not hasattr(self, "buffer"):
            return
        self.buffer.pool.check_integrity()
        for number, entered in self.inside.items():
            assert same_adapter(entered[0].weights, self.sources[number])
        for mark, pages in self.held.items():
            assert all(self.buffer.bytes[page].unique().tolist() == [mark % 251 + 1] for page in pages)
        held = sum(self.pages.pages(self.entries[number]) for number in self.inside)
        assert self.buffer.pool.used == held + sum(map(len, self.held.values()))


Machine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestAdaptersInPages = Machine.TestCase
