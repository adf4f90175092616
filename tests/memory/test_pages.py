"""The page pool against a model of it: nobody gets a page that another writes to, none is lost, none waits in vain."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from coserve.memory.pages import PagePool

KEYS = st.binary(min_size=1, max_size=1).map(lambda key: bytes([key[0] % 8]))


class PoolMachine(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize(pages=st.integers(1, 12))
    def start(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.out = Counter[int]()
        self.labels = dict[bytes, int]()  # as far as nobody took the page since
        self.idle = list[int]()  # longest first

    @rule(target=held, n=st.integers(0, 6))
    def take(self, n: int) -> list[int]:
        before = self.pool.free
        assert before == self.pool.total - len(self.out)
        pages = self.pool.take(n)
        assert (pages is None) == (n > before)
        if pages is None:
            assert self.pool.free == before
            return []
        assert len(pages) == len(set(pages)) == n
        assert not set(pages) & set(self.out)
        evicted = max(0, n - (before - len(self.idle)))
        assert set(pages) & set(self.idle) == set(self.idle[:evicted]), "blank pages go first, then the longest idle"
        self.idle = self.idle[evicted:]
        self.labels = {key: page for key, page in self.labels.items() if page not in pages}
        self.out.update(pages)
        return pages

    @rule(pages=consumes(held))
    def give(self, pages: list[int]) -> None:
        self.pool.give(pages)
        self.out.subtract(pages)
        for page in reversed(pages):
            if not self.out[page] and page in self.labels.values():
                self.idle.append(page)
        self.out = +self.out

    @rule(pages=held, key=KEYS)
    def label(self, pages: list[int], key: bytes) -> None:
        for page in pages:
            if page in self.out and page not in self.labels.values():
                self.pool.label(page, key)
                self.labels.setdefault(key, page)

    @rule(target=held, keys=st.lists(KEYS, max_size=4, unique=True))
    def find(self, keys: list[bytes]) -> list[int]:
        expected = []
        for key in keys:
            if key not in self.labels:
                break
            expected.append(self.labels[key])
        found = self.pool.find(keys)
        assert found == expected
        self.idle = [page for page in self.idle if page not in found]
        self.out.update(found)
        return found

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            assert self.pool.used == len(self.out)
            assert self.pool.used + self.pool.free == self.pool.total
            assert self.pool.idle == len(self.idle)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def taken(pool: PagePool, n: int) -> list[int]:
    pages = pool.take(n)
    assert pages is not None
    return pages


def test_the_ends_of_what_was_given_back_first_are_evicted_first() -> None:
    pool = PagePool(5)
    first, second = taken(pool, 2), taken(pool, 3)
    for page in (*first, *second):
        pool.label(page, bytes([page]))
    pool.give(first)
    pool.give(second)
    order = [*reversed(first), *reversed(second)]
    assert [taken(pool, 1)[0] for _ in range(5)] == order


def test_what_was_found_again_is_evicted_later() -> None:
    pool = PagePool(2)
    a, b = taken(pool, 2)
    pool.label(a, b"a")
    pool.label(b, b"b")
    pool.give([a])
    pool.give([b])
    pool.give(pool.find([b"a"]))
    assert taken(pool, 1) == [b]
    assert pool.find([b"b"]) == []
    assert pool.find([b"a"]) == [a]


def test_a_page_stays_while_one_of_its_holders_does() -> None:
    pool = PagePool(2)
    pages = taken(pool, 1)
    pool.label(pages[0], b"x")
    assert pool.find([b"x", b"y"]) == pages
    pool.give(pages)
    assert (pool.used, pool.free, pool.idle) == (1, 1, 0)
    assert pool.take(2) is None
    pool.give(pages)
    assert (pool.used, pool.free, pool.idle) == (0, 2, 1)


def test_the_second_page_of_one_key_is_not_kept() -> None:
    pool = PagePool(2)
    a, b = taken(pool, 2)
    pool.label(a, b"x")
    pool.label(b, b"x")
    pool.give([a, b])
    assert pool.idle == 1
    assert pool.find([b"x"]) == [a]


def test_giving_a_page_twice_is_an_assertion() -> None:
    pool = PagePool(3)
    pages = taken(pool, 2)
    pool.give(pages)
    with pytest.raises(AssertionError, match="not held"):
        pool.give(pages[:1])


def test_giving_a_page_that_is_none_of_the_pools_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="not held"):
        PagePool(3).give([7])


def test_labels_are_for_held_pages_and_for_good() -> None:
    pool = PagePool(1)
    with pytest.raises(AssertionError, match="not held"):
        pool.label(0, b"x")
    pool.label(taken(pool, 1)[0], b"x")
    with pytest.raises(AssertionError, match="twice"):
        pool.label(0, b"y")


def test_ten_thousand_contents_leave_no_more_behind_than_there_are_pages() -> None:
    pool = PagePool(16)
    for i in range(10_000):
        pages = taken(pool, 1 + i % 3)
        for page in pages:
            pool.label(page, f"{i} {page}".encode())
        pool.give(pages)
    pool.check_integrity()
    assert len(pool._keys) == len(pool._pages) == pool.idle == pool.total
    assert len(pool._holders) == 0
