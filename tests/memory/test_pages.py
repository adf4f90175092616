"""The page pool against a model of it: nobody holds a page twice, none is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from coserve.memory.pages import PagePool


class PoolMachine(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize(pages=st.integers(1, 12))
    def start(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.out: list[int] = []

    @rule(target=held, n=st.integers(0, 6))
    def take(self, n: int) -> list[int]:
        before = self.pool.free
        pages = self.pool.take(n)
        assert (pages is None) == (n > before)
        if pages is None:
            assert self.pool.free == before
            return []
        assert len(pages) == n
        assert not set(pages) & set(self.out)
        self.out += pages
        return pages

    @rule(pages=consumes(held))
    def give(self, pages: list[int]) -> None:
        self.pool.give(pages)
        for page in pages:
            self.out.remove(page)

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            assert self.pool.used == len(self.out)
            assert self.pool.used + self.pool.free == self.pool.total


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_giving_a_page_twice_is_an_assertion() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    assert pages is not None
    pool.give(pages)
    with pytest.raises(AssertionError, match="not held"):
        pool.give(pages[:1])


def test_giving_a_page_that_is_none_of_the_pools_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="not held"):
        PagePool(3).give([7])
