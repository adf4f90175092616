"""Adapters in pages: what is read there is the adapter, as long as somebody is in with it."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coserve.adapter_store.packing import one_piece, packed, packed_bytes
from coserve.adapter_store.pages import AdapterPages, Entered
from coserve.kernels.lora.types import LoraPair
from coserve.memory.buffer import ALIGNMENT, PageBuffer
from coserve.model.lora import LoraWeights
from coserve.types import LoraSettings
from tests.support.examples import examples

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


def same(a: LoraWeights, b: LoraWeights) -> bool:
    return list(a.sites) == list(b.sites) and all(
        torch.equal(a.sites[name].a_RD, b.sites[name].a_RD)
        and torch.equal(a.sites[name].b_OR, b.sites[name].b_OR)
        and a.sites[name].scaling == b.sites[name].scaling
        for name in a.sites
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_in_pages_are_contiguous_and_begin_at_a_line(dtype: torch.dtype) -> None:
    buffer = PageBuffer(20, PAGE, CPU)
    pages, source = AdapterPages(buffer), adapter(0, 3, dtype=dtype)
    entered = pages.enter(source)
    assert entered is not None
    assert same(entered.weights, source)
    assert buffer.pool.used == pages.pages(source) == -(-packed_bytes(source) // PAGE)
    for pair in entered.weights.sites.values():
        for matrix in (pair.a_RD, pair.b_OR):
            assert matrix.is_contiguous()
            assert (matrix.data_ptr() - buffer.bytes.data_ptr()) % ALIGNMENT == 0


def test_what_is_packed_goes_over_in_one_copy() -> None:
    source = adapter(0, 3)
    whole = packed(source, pinned=False)
    assert same(whole, source)
    assert one_piece(source) is None
    one = one_piece(whole)
    assert one is not None
    assert one.numel() == packed_bytes(source)
    part = LoraWeights(whole.settings, {"site1": whole.sites["site1"]})
    assert one_piece(part) is None
    entered = AdapterPages(PageBuffer(20, PAGE, CPU)).enter(whole)
    assert entered is not None
    assert same(entered.weights, source)


def test_an_adapter_of_no_sites_has_a_page() -> None:
    pages = AdapterPages(PageBuffer(2, PAGE, CPU))
    entered = pages.enter(LoraWeights(LoraSettings(), {}))
    assert entered is not None
    assert entered.weights.sites == {}


def test_it_stays_when_nobody_is_in_with_it_until_its_pages_are_needed() -> None:
    buffer = PageBuffer(6, PAGE, CPU)
    pages, source = AdapterPages(buffer), adapter(0, 3)
    need = pages.pages(source)
    first = pages.enter(source)
    assert first is not None
    assert pages.needs(source) == 0
    pages.leave(source)
    assert (buffer.pool.used, pages.needs(source)) == (0, need)
    again = pages.enter(source)
    assert again is not None
    assert again.weights is first.weights
    pages.leave(source)
    others = buffer.pool.take(6)
    assert others is not None
    assert pages.enter(source) is None
    buffer.pool.give(others)
    back = pages.enter(source)
    assert back is not None
    assert back.weights is not first.weights, "addresses of the old one must not be taken for those of the new one"
    assert same(back.weights, source)


def test_pages_of_an_adapter_that_nobody_can_ask_for_are_blank() -> None:
    buffer = PageBuffer(6, PAGE, CPU)
    pages, source = AdapterPages(buffer), adapter(0, 3)
    assert pages.enter(source) is not None
    pages.leave(source)
    assert buffer.pool.idle > 0
    del source
    gc.collect()
    other = adapter(1, 1)
    assert pages.needs(other) == pages.pages(other)
    assert buffer.pool.idle == 0
    buffer.pool.check_integrity()


class Machine(RuleBasedStateMachine):
    """Adapters that come and go among pages that are taken, labelled, moved and given back; marks say whose a page is."""

    @initialize(pages=st.integers(1, 16))
    def start(self, pages: int) -> None:
        self.buffer = PageBuffer(pages, PAGE, CPU)
        self.pages = AdapterPages(self.buffer)
        self.sources = {number: adapter(number, 1 + number % 3, 1 + number % 2) for number in range(5)}
        self.made = 5
        self.inside: dict[int, list[Entered]] = {}
        self.held: dict[int, list[int]] = {}  # mark -> pages
        self.marks = 0

    @rule(number=st.integers(0, 4))
    def enter(self, number: int) -> None:
        source = self.sources[number]
        need, free = self.pages.needs(source), self.buffer.pool.free
        entered = self.pages.enter(source)
        if entered is None:
            assert need > free or self.inside, "room enough, and no other adapter in the way"
            return
        assert need <= free
        assert self.buffer.pool.free == free - need
        assert all(entered.weights is other.weights for other in self.inside.get(number, ()))
        self.inside.setdefault(number, []).append(entered)
        for pages in self.held.values():
            pages[:] = [entered.moved.get(page, page) for page in pages]

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.inside)))
        self.pages.leave(self.sources[number])
        self.inside[number].pop()
        if not self.inside[number]:
            del self.inside[number]

    @rule(number=st.integers(0, 4))
    def is_no_more(self, number: int) -> None:
        if number not in self.inside:
            self.sources[number] = adapter(self.made, 1 + self.made % 4)
            self.made += 1

    @rule(n=st.integers(1, 6))
    def take(self, n: int) -> None:
        pages = self.buffer.pool.take(n)
        if pages is not None:
            self.marks += 1
            self.held[self.marks] = pages
            for page in pages:
                self.buffer.bytes[page] = self.marks % 251 + 1
                if page % 2:
                    self.buffer.pool.label(page, f"{self.marks} {page}".encode())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        self.buffer.pool.give(self.held.pop(data.draw(st.sampled_from(sorted(self.held)))))

    @invariant()
    def nobody_writes_to_what_is_anothers(self) -> None:
        if not hasattr(self, "buffer"):
            return
        self.buffer.pool.check_integrity()
        for number, entered in self.inside.items():
            assert same(entered[0].weights, self.sources[number])
        for mark, pages in self.held.items():
            assert all(self.buffer.bytes[page].unique().tolist() == [mark % 251 + 1] for page in pages)
        held = sum(self.pages.pages(self.sources[number]) for number in self.inside)
        assert self.buffer.pool.used == held + sum(map(len, self.held.values()))


Machine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestAdaptersInPages = Machine.TestCase
