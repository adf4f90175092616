"""The page pool's bookkeeping: which pages are in use, cached or empty, and where there is a run of them for a span. No
tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

EMPTY = 0
"""State of a page without content. A cached page's state is the time at which it became cached: between EMPTY and
IN_USE."""
IN_USE = int(np.iinfo(np.int64).max) - 1
"""State of a single page with references. It may be moved."""
PINNED = IN_USE + 1
"""State of the pages of a span with references. They must not move, as kernels use their addresses."""


def free_run(state: NDArray[np.int64], n: int) -> int | None:
    """Return the first page of the best run of `n` pages without references, or None. `state`: (P) int64.

    The best run is the one whose most recently used page is the oldest; among equals, the highest.
    """
    newest, width = state, 1  # newest[i]: the most recent use among pages i to i + width - 1
    while width < n:
        step = min(width, n - width)
        newest = np.maximum(newest[:-step], newest[step:])
        width += step
    best = int(newest.min())
    return _last(newest == best) if best < IN_USE else None


def cheapest_run(state: NDArray[np.int64], n: int) -> int | None:
    """Return the first page of the run of `n` unpinned pages with the fewest in use, or None; among equals, the
    highest."""
    used, pinned = _sums(state == IN_USE, n), _sums(state == PINNED, n)
    cost = np.where(pinned == 0, used, n + 1)
    best = int(cost.min())
    return _last(cost == best) if best <= n else None


def _sums(of: NDArray[np.bool_], n: int) -> NDArray[np.int64]:
    """(P - n + 1): for each page, how many of the `n` pages from it on are True in `of` (P)."""
    total = np.zeros(len(of) + 1, dtype=np.int64)
    np.cumsum(of, out=total[1:])
    sums: NDArray[np.int64] = total[n:] - total[:-n]
    return sums


def _last(true: NDArray[np.bool_]) -> int:
    return len(true) - 1 - int(np.argmax(true[::-1]))


@dataclass(eq=False)
class Span:
    """Consecutive pages that are in use, cached and evicted together: `pages` from `first` on."""

    first: int
    pages: int
    evicted: Callable[[], None]
    """Called when the pool has evicted the span. It must not use the pool."""
    references: int = 1


class PagePool:
    """Pages 0 to pages - 1, each of which is empty, in use (with a reference count) or cached.

    A page in use may get a key that identifies its content. When its last reference is freed, a page with a key becomes
    cached: `find` returns it again until it is evicted. A page without a key becomes empty. `allocate` returns empty
    pages first, then evicts the least recently used cached ones.

    A span is a run of consecutive pages. A cached span is evicted as a whole, in LRU order with the cached pages.
    Single pages are allocated from the low end and spans from the high end; single pages may be moved to make place for
    a span.
    """

    def __init__(self, pages: int) -> None:
        assert pages > 0, f"expected at least one page, got {pages}"
        self.total = pages
        self._heap = list(range(pages))
        """All empty pages, and some that are no longer empty."""
        self._in_heap = bytearray(b"\1" * pages)
        self._empty_pages = pages
        self._references = Counter[int]()
        """Reference counts of single pages."""
        self._cached = OrderedDict[int, None]()
        """Cached pages, and first pages of cached spans, least recently used first."""
        self._cached_pages = 0
        self._pages = dict[bytes, int]()
        self._keys = dict[int, bytes]()
        self._spans = dict[int, Span]()
        """Spans in use or cached, by first page."""
        self._state = np.zeros(pages, dtype=np.int64)
        """State of each page: EMPTY, IN_USE (single page), PINNED (part of a span in use), or the time at which it
        became cached."""
        self._clock = EMPTY

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated: empty and cached ones."""
        return self._empty_pages + self._cached_pages

    @property
    def cached(self) -> int:
        """Pages without references whose content can still be found."""
        return self._cached_pages

    @property
    def used(self) -> int:
        """Pages with references."""
        return self.total - self.free_pages

    def in_use(self) -> NDArray[np.bool_]:
        """(P): whether each page has references, its own or its span's."""
        used: NDArray[np.bool_] = self._state >= IN_USE
        return used

    def references(self, page: int) -> int:
        """Return the reference count of a single page."""
        return self._references[page]

    @property
    def in_spans(self) -> int:
        """Number of pages in spans, in use or cached."""
        return sum(span.pages for span in self._spans.values())

    def allocate(self, n: int) -> list[int] | None:
        """`n` pages with one reference each; None, and no change, if fewer are free."""
        assert n >= 0, f"expected a count, got {n}"
        if n > self.free_pages:
            return None
        while self._empty_pages < n:
            self._evict(next(iter(self._cached)))
        pages = [self._pop_empty() for _ in range(n)]
        for page in pages:
            self._references[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Drop one reference to each of these pages.

        The pages that become cached are evicted from the last one on, since `find` reaches a page only through the one
        before it.
        """
        for page in reversed(pages):
            assert page in self._references, f"page {page} is freed but not in use"
            self._references[page] -= 1
            if self._references[page] == 0:
                del self._references[page]
                if page in self._keys:
                    self._cache(page, 1)
                else:
                    self._make_empty(page)

    def label(self, page: int, key: bytes) -> None:
        """Give a page in use a key, so that `find` returns it. Its content must be complete and no longer change.

        Does nothing if another page has the key.
        """
        assert page in self._references, f"page {page} is labelled but not in use"
        if key not in self._pages:
            assert page not in self._keys, f"page {page} is labelled twice"
            self._pages[key] = page
            self._keys[page] = key

    def unlabel(self, page: int) -> None:
        """Remove the key of a page in use, if it has one."""
        assert page in self._references, f"page {page} is unlabelled but not in use"
        if (key := self._keys.pop(page, None)) is not None:
            del self._pages[key]

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest known prefix of `keys`, each with one more reference."""
        found: list[int] = []
        for key in keys:
            if (page := self._pages.get(key)) is None:
                break
            if page in self._cached:
                self._reuse(page, 1, IN_USE)
            self._references[page] += 1
            found.append(page)
        return found

    def hold(self, pages: Iterable[int]) -> None:
        """Add a reference to each of these single pages, which are in use."""
        for page in pages:
            self._references[page] += 1

    def allocate_span(self, n: int, evicted: Callable[[], None] = lambda: None) -> tuple[Span, dict[int, int]] | None:
        """Allocate `n` consecutive pages. Return the span, and the pages that moved to make room (old -> new page).

        If no run of `n` pages is free, the run with the fewest single pages in use is cleared: these pages move, with
        their references and keys. The caller must copy their contents before it writes to the span, and update page
        tables. Returns None and changes nothing if there is no room: fewer than `n` pages are free, or spans in use
        leave only shorter runs between them.
        """
        assert n > 0, f"expected at least one page, got {n}"
        first = self._place(n)
        if first is None:
            return None
        for span in [
            span for span in self._spans.values() if span.first < first + n and first < span.first + span.pages
        ]:
            self._evict(span.first)
        inside = range(first, first + n)
        for page in inside:
            if page in self._cached:
                self._evict(page)
        used = [page for page in inside if page in self._references]
        self._empty_pages -= n - len(used)
        self._state[first : first + n] = PINNED
        moved: dict[int, int] = {}
        if used:
            others = self.allocate(len(used))
            assert others is not None, "fewer pages are free than were counted"
            moved = dict(zip(used, others, strict=True))
            for page, to in moved.items():
                self._move(page, to)
        span = self._spans[first] = Span(first, n, evicted)
        return span, moved

    def fits_span(self, n: int) -> bool:
        """Whether `allocate_span` would succeed now."""
        return self._place(n) is not None

    def _place(self, n: int) -> int | None:
        if n > self.free_pages:
            return None
        first = free_run(self._state, n)
        return cheapest_run(self._state, n) if first is None else first

    def acquire_span(self, span: Span) -> bool:
        """Add a reference to a span; False if it has been evicted."""
        if self._spans.get(span.first) is not span:
            return False
        if not span.references:
            self._reuse(span.first, span.pages, PINNED)
        span.references += 1
        return True

    def release_span(self, span: Span) -> None:
        """Drop a reference. Without references the span is cached with its content."""
        assert self._spans.get(span.first) is span and span.references > 0, "a span is released but not in use"
        span.references -= 1
        if not span.references:
            self._cache(span.first, span.pages)

    def drop_span(self, span: Span) -> None:
        """Evict a cached span now. Does nothing if it has been evicted."""
        if self._spans.get(span.first) is span:
            assert not span.references, "a span is dropped while it is in use"
            self._evict(span.first)

    def _cache(self, first: int, pages: int) -> None:
        """Mark pages in use as cached, most recently used."""
        self._clock += 1
        self._state[first : first + pages] = self._clock
        self._cached[first] = None
        self._cached_pages += pages

    def _reuse(self, first: int, pages: int, state: int) -> None:
        """Mark cached pages as in use again."""
        del self._cached[first]
        self._state[first : first + pages] = state
        self._cached_pages -= pages

    def _evict(self, first: int) -> None:
        span = self._spans.pop(first, None)
        pages = 1 if span is None else span.pages
        del self._cached[first]
        self._cached_pages -= pages
        if span is None:
            del self._pages[self._keys.pop(first)]
        for page in range(first, first + pages):
            self._make_empty(page)
        if span is not None:
            span.evicted()

    def _move(self, page: int, to: int) -> None:
        """Move the references and the key of `page` to `to`, which was just allocated."""
        self._references[to] = self._references.pop(page)
        if (key := self._keys.pop(page, None)) is not None:
            self._keys[to] = key
            self._pages[key] = to

    def _make_empty(self, page: int) -> None:
        self._state[page] = EMPTY
        self._empty_pages += 1
        if not self._in_heap[page]:
            self._in_heap[page] = 1
            heappush(self._heap, page)

    def _pop_empty(self) -> int:
        """Take the lowest empty page into use."""
        while True:
            page = heappop(self._heap)
            self._in_heap[page] = 0
            if self._state[page] == EMPTY:
                self._state[page] = IN_USE
                self._empty_pages -= 1
                return page

    def check_integrity(self) -> None:
        """Assert that every page is in exactly one state, and that keys, spans and pages agree."""
        spans = [set(range(span.first, span.first + span.pages)) for span in self._spans.values()]
        pinned = [pages for span, pages in zip(self._spans.values(), spans, strict=True) if span.references]
        unpinned = [pages for span, pages in zip(self._spans.values(), spans, strict=True) if not span.references]
        empty = {page for page in range(self.total) if self._state[page] == EMPTY}
        cached = {page for page in self._cached if page not in self._spans}
        states = [empty, cached, set(self._references), *spans]
        assert sum(map(len, states)) == self.total, "a page is in two states, or in none"
        assert set[int]().union(*states) == set(range(self.total)), "a page is lost, or is none of the pool's"
        assert all(self._state[page] == IN_USE for page in self._references), (
            "a page in use is marked as something else"
        )
        assert all(self._state[page] == PINNED for pages in pinned for page in pages), "a span in use is not marked"
        assert {span.first for span in self._spans.values() if not span.references} == set(self._cached) - cached
        assert self._empty_pages == len(empty), "empty pages are miscounted"
        assert self._cached_pages == len(cached) + sum(map(len, unpinned)), "cached pages are miscounted"
        ages = [int(self._state[first]) for first in self._cached]
        assert ages == sorted(set(ages)), "cached pages are out of order"
        assert empty <= set(self._heap), "an empty page is not in the heap"
        assert len(self._heap) == len(set(self._heap)) == sum(self._in_heap), "the heap holds a page twice"
        assert all(count > 0 for count in self._references.values()), "a page in use has no reference"
        assert self._pages == {key: page for page, key in self._keys.items()}, "keys and pages disagree"
        assert cached <= set(self._keys), "a cached page has no key"
        assert not empty & set(self._keys), "an empty page has a key"
