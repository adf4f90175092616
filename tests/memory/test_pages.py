"""The page pool against a model of it: no page has two writers, none is lost, and an allocation that fits succeeds."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from coserve.memory.pages import PagePool, Span
from tests.support.examples import examples

KEYS = st.binary(min_size=1, max_size=1).map(lambda key: bytes([key[0] % 8]))


class PoolMachine(RuleBasedStateMachine):
    held = Bundle("held")
    spans = Bundle("spans")

    @initialize(pages=st.integers(1, 14))
    def start(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.out = Counter[int]()
        self.lists = list[list[int]]()  # what takers and finders hold: they are told where pages moved
        self.labels = dict[bytes, int]()  # as far as nobody took the page since
        self.idle = list[tuple[int, ...]]()  # pages and spans, longest first
        self.fixed = set[int]()

    def forget(self, entry: tuple[int, ...]) -> None:
        self.idle.remove(entry)
        self.labels = {key: page for key, page in self.labels.items() if page not in entry}

    def make_room(self, n: int) -> None:
        """What a taker of `n` pages evicts: as little as it needs, the longest idle first."""
        free = self.pool.total - len(self.out) - len(self.fixed)
        blank = free - sum(map(len, self.idle))
        while blank < n:
            blank += len(self.idle[0])
            self.forget(self.idle[0])

    @rule(target=held, n=st.integers(0, 6))
    def take(self, n: int) -> list[int]:
        before = self.pool.free_pages
        assert before == self.pool.total - len(self.out) - len(self.fixed)
        pages = self.pool.allocate(n)
        assert (pages is None) == (n > before)
        if pages is None:
            assert self.pool.free_pages == before
            return []
        assert len(pages) == len(set(pages)) == n
        self.make_room(n)
        assert not set(pages) & {*self.out, *self.fixed, *chain(*self.idle)}
        self.out.update(pages)
        self.lists.append(pages)
        return pages

    @rule(pages=consumes(held))
    def give(self, pages: list[int]) -> None:
        self.pool.free(pages)
        self.lists = [other for other in self.lists if other is not pages]
        for page in reversed(pages):
            self.out[page] -= 1
            if not self.out[page] and page in self.labels.values():
                self.idle.append((page,))
        self.out = +self.out

    @rule(pages=held, key=KEYS)
    def label(self, pages: list[int], key: bytes) -> None:
        for page in pages:
            if page not in self.labels.values():
                self.pool.label(page, key)
                self.labels.setdefault(key, page)

    @rule(pages=held)
    def unlabel(self, pages: list[int]) -> None:
        for page in pages:
            self.pool.unlabel(page)
        self.labels = {key: page for key, page in self.labels.items() if page not in pages}

    @rule(target=held, keys=st.lists(KEYS, max_size=4, unique=True))
    def find(self, keys: list[bytes]) -> list[int]:
        expected = []
        for key in keys:
            if key not in self.labels:
                break
            expected.append(self.labels[key])
        found = self.pool.find(keys)
        assert found == expected
        self.idle = [entry for entry in self.idle if entry[0] not in found]
        self.out.update(found)
        self.lists.append(found)
        return found

    @rule(target=spans, n=st.integers(1, 5))
    def allocate_span(self, n: int) -> Span | None:
        windows = [range(first, first + n) for first in range(self.pool.total - n + 1)]
        windows = [window for window in windows if not self.fixed.intersection(window)]
        free = self.pool.total - len(self.out) - len(self.fixed)
        taken = self.pool.allocate_span(n)
        assert (taken is None) == (n > free or not windows)
        if taken is None:
            assert self.pool.free_pages == free
            return None
        span, moved = taken
        inside = range(span.first, span.first + span.pages)
        assert inside in windows
        assert set(moved) == {page for page in self.out if page in inside}
        assert len(moved) == min(len(set(self.out).intersection(window)) for window in windows), "as few as can be"
        for entry in [entry for entry in self.idle if set(entry) & set(inside)]:
            self.forget(entry)
        self.fixed.update(inside)
        self.out = Counter({page: count for page, count in self.out.items() if page not in moved})
        gone = Counter({moved[page]: sum(other.count(page) for other in self.lists) for page in moved})
        self.make_room(len(moved))
        assert not set(gone) & {*self.out, *self.fixed, *chain(*self.idle)}
        self.out += gone
        self.labels = {key: moved.get(page, page) for key, page in self.labels.items()}
        for other in self.lists:
            other[:] = [moved.get(page, page) for page in other]
        return span

    @rule(span=spans)
    def acquire_span(self, span: Span | None) -> None:
        if span is None:
            return
        inside = tuple(range(span.first, span.first + span.pages))
        lives = inside in self.idle or (span.references > 0 and set(inside) <= self.fixed)
        if self.pool.acquire_span(span):
            assert lives
            self.idle = [entry for entry in self.idle if entry != inside]
            self.fixed.update(inside)
        else:
            assert span.references == 0

    @rule(span=spans)
    def release_span(self, span: Span | None) -> None:
        if span is None or not span.references:
            return
        self.pool.release_span(span)
        if not span.references:
            inside = tuple(range(span.first, span.first + span.pages))
            self.fixed.difference_update(inside)
            self.idle.append(inside)

    @rule(span=consumes(spans))
    def drop_span(self, span: Span | None) -> None:
        if span is None:
            return
        while span.references:
            self.release_span(span)
        before = self.pool.cached
        self.pool.drop_span(span)
        if self.pool.cached != before:
            self.forget(tuple(range(span.first, span.first + span.pages)))

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            assert self.pool.used == len(self.out) + len(self.fixed)
            assert self.pool.used + self.pool.free_pages == self.pool.total
            assert self.pool.cached == sum(map(len, self.idle))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


def taken(pool: PagePool, n: int) -> list[int]:
    pages = pool.allocate(n)
    assert pages is not None
    return pages


def test_the_ends_of_what_was_given_back_first_are_evicted_first() -> None:
    pool = PagePool(5)
    first, second = taken(pool, 2), taken(pool, 3)
    for page in (*first, *second):
        pool.label(page, bytes([page]))
    pool.free(first)
    pool.free(second)
    order = [*reversed(first), *reversed(second)]
    assert [taken(pool, 1)[0] for _ in range(5)] == order


def test_what_was_found_again_is_evicted_later() -> None:
    pool = PagePool(2)
    a, b = taken(pool, 2)
    pool.label(a, b"a")
    pool.label(b, b"b")
    pool.free([a])
    pool.free([b])
    pool.free(pool.find([b"a"]))
    assert taken(pool, 1) == [b]
    assert pool.find([b"b"]) == []
    assert pool.find([b"a"]) == [a]


def test_a_page_stays_while_one_of_its_holders_does() -> None:
    pool = PagePool(2)
    pages = taken(pool, 1)
    pool.label(pages[0], b"x")
    assert pool.find([b"x", b"y"]) == pages
    pool.free(pages)
    assert (pool.used, pool.free_pages, pool.cached) == (1, 1, 0)
    assert pool.allocate(2) is None
    pool.free(pages)
    assert (pool.used, pool.free_pages, pool.cached) == (0, 2, 1)


def test_giving_a_page_twice_or_one_of_no_pool_is_an_assertion() -> None:
    pool = PagePool(3)
    pages = taken(pool, 2)
    pool.free(pages)
    for page in (pages[0], 7):
        with pytest.raises(AssertionError, match="not in use"):
            pool.free([page])


def test_labels_are_for_held_pages_and_for_good() -> None:
    pool = PagePool(1)
    with pytest.raises(AssertionError, match="not in use"):
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
        pool.free(pages)
    pool.check_integrity()
    keys = [f"{i} {page}".encode() for i in range(10_000) for page in range(pool.total)]
    assert sum(bool(pool.find([key])) for key in keys) == pool.total


def spanned(pool: PagePool, n: int) -> tuple[Span, dict[int, int]]:
    taken = pool.allocate_span(n)
    assert taken is not None
    return taken


def test_single_pages_come_from_the_low_end_and_spans_from_the_high_end() -> None:
    pool = PagePool(10)
    assert taken(pool, 2) == [0, 1]
    assert [(span.first, moved) for span, moved in (spanned(pool, 3), spanned(pool, 2))] == [(7, {}), (5, {})]
    assert taken(pool, 2) == [2, 3]


def test_what_was_used_longest_ago_gives_way_to_a_span() -> None:
    pool = PagePool(6)
    pages = taken(pool, 6)
    for page in pages:
        pool.label(page, bytes([page]))
    for pair in ((2, 3), (4, 5), (0, 1)):
        pool.free(pair)
    assert spanned(pool, 2)[0].first == 2
    assert pool.find([b"\x02"]) == []
    assert pool.find([b"\x04"]) == [4]


def test_an_idle_span_is_evicted_whole_and_in_its_turn() -> None:
    pool = PagePool(5)
    span, _ = spanned(pool, 3)
    pages = taken(pool, 2)
    pool.label(pages[0], b"x")
    pool.free(pages[:1])
    pool.release_span(span)
    assert taken(pool, 1) == pages[:1], "the page was idle for longer"
    assert pool.acquire_span(span)
    pool.release_span(span)
    assert len(taken(pool, 1)) == 1
    assert not pool.acquire_span(span)
    assert pool.free_pages == 2


def test_held_pages_move_out_of_the_way_with_their_keys_and_all_their_holders() -> None:
    pool = PagePool(6)
    pages = taken(pool, 6)
    pool.label(4, b"x")
    assert pool.find([b"x"]) == [4]
    pool.free([0, 3, 5])
    span, moved = spanned(pool, 2)
    assert (span.first, moved) == (4, {4: 0})
    assert pool.find([b"x"]) == [0]
    pool.free([0, 0, 0])
    assert pool.cached == 1
    pool.check_integrity()
    assert pages


def test_a_span_waits_only_for_pages_or_for_held_spans() -> None:
    pool = PagePool(5)
    first, second, middle, *others = [spanned(pool, 1)[0] for _ in range(5)]
    for span in (first, second, *others):
        pool.release_span(span)
    assert pool.allocate_span(3) is None
    assert pool.allocate_span(6) is None
    assert pool.free_pages == 4
    pool.release_span(middle)
    assert spanned(pool, 5)[0].first == 0
