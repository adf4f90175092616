"""Who holds which page of the pool, and what pages that nobody holds may still be good for. No tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from coserve.memory.spans import BLANK, FIXED, HELD, crowded, gap


@dataclass(eq=False)
class Span:
    """Consecutive pages that are held, idle and evicted together: `pages` from `first` on.

    `evicted` is called when the pool has evicted it, and must not use the pool.
    """

    first: int
    pages: int
    evicted: Callable[[], None]
    holders: int = 1


class PagePool:
    """`pages` pages, named 0 to pages - 1. Each is blank, held by one or more, or idle.

    A held page may be given a key that says what it holds. When its last holder gives it back, a page with a key stays
    idle with its content, and `find` hands it out again; one without is blank. A taker gets blank pages first, then the
    idle ones that nobody has held for longest: nobody ever waits for an idle page.

    Spans are for what must lie in one piece. An idle span is evicted as a whole, in its turn among the idle pages.
    Single pages come from the low end and spans from the high end, and single pages may be moved to make room for one.
    """

    def __init__(self, pages: int) -> None:
        assert pages > 0, f"expected at least one page, got {pages}"
        self.total = pages
        self._blank = list(range(pages))
        """A heap of the blank pages, and of some that are blank no longer."""
        self._in_heap = bytearray(b"\1" * pages)
        self._blanks = pages
        self._holders = Counter[int]()
        """Of single pages."""
        self._idle = OrderedDict[int, None]()
        """Pages, and first pages of spans, in the order in which their last holders left."""
        self._idle_pages = 0
        self._pages = dict[bytes, int]()
        self._keys = dict[int, bytes]()
        self._spans = dict[int, Span]()
        """By first page, those that are held or idle."""
        self._state = np.zeros(pages, dtype=np.int64)
        """BLANK, HELD (by single holders), FIXED (part of a span that is held), or when it became idle."""
        self._clock = BLANK

    @property
    def free_pages(self) -> int:
        """Pages that can be taken: blank ones and idle ones."""
        return self._blanks + self._idle_pages

    @property
    def idle(self) -> int:
        """Pages that nobody holds and whose content can still be found."""
        return self._idle_pages

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.total - self.free_pages

    @property
    def in_spans(self) -> int:
        """Pages of spans, held or idle."""
        return sum(span.pages for span in self._spans.values())

    def allocate(self, n: int) -> list[int] | None:
        """`n` pages that nobody else holds, or None (and nothing taken) when fewer are free."""
        assert n >= 0, f"expected a count, got {n}"
        if n > self.free_pages:
            return None
        while self._blanks < n:
            self._evict(next(iter(self._idle)))
        pages = [self._pop_blank() for _ in range(n)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Return pages that were taken or found; giving one more often than that is a bug of the caller.

        Of those that become idle, the last ones are evicted first: what comes after a page is found only by way of it.
        """
        for page in reversed(pages):
            assert page in self._holders, f"page {page} is given back but not held"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                del self._holders[page]
                if page in self._keys:
                    self._retire(page, 1)
                else:
                    self._make_blank(page)

    def label(self, page: int, key: bytes) -> None:
        """From now on `find` knows a held page by `key`: its content is complete and will not change while it has it.

        If another page has the key already, nothing happens: one is enough.
        """
        assert page in self._holders, f"page {page} is labelled but not held"
        if key not in self._pages:
            assert page not in self._keys, f"page {page} is labelled twice"
            self._pages[key] = page
            self._keys[page] = key

    def unlabel(self, page: int) -> None:
        """`find` no longer knows a held page; nothing happens if it has no key."""
        assert page in self._holders, f"page {page} is unlabelled but not held"
        if (key := self._keys.pop(page, None)) is not None:
            del self._pages[key]

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the first keys, up to one that no page has; each has one more holder now."""
        found: list[int] = []
        for key in keys:
            if (page := self._pages.get(key)) is None:
                break
            if page in self._idle:
                self._wake(page, 1, HELD)
            self._holders[page] += 1
            found.append(page)
        return found

    def allocate_span(self, n: int, evicted: Callable[[], None] = lambda: None) -> tuple[Span, dict[int, int]] | None:
        """`n` consecutive pages, and where pages moved that were in the way; None, and nothing changed, if there are none.

        Moved pages have their holders and keys at the new place; the caller copies the contents before it writes to the
        span, and tells the holders. Where no gap is free, the `n` pages with the fewest held ones become one. So the
        span is found whenever `n` pages are free, unless held spans cut the pool into pieces that are all too short.
        """
        assert n > 0, f"expected at least one page, got {n}"
        if n > self.free_pages:
            return None
        first = gap(self._state, n)
        if first is None:
            first = crowded(self._state, n)
        if first is None:
            return None
        for span in [
            span for span in self._spans.values() if span.first < first + n and first < span.first + span.pages
        ]:
            self._evict(span.first)
        inside = range(first, first + n)
        for page in inside:
            if page in self._idle:
                self._evict(page)
        held = [page for page in inside if page in self._holders]
        self._blanks -= n - len(held)
        self._state[first : first + n] = FIXED
        moved: dict[int, int] = {}
        if held:
            others = self.allocate(len(held))
            assert others is not None, "fewer pages are free than were counted"
            moved = dict(zip(held, others, strict=True))
            for page, to in moved.items():
                self._move(page, to)
        span = self._spans[first] = Span(first, n, evicted)
        return span, moved

    def hold_span(self, span: Span) -> bool:
        """One more holder of a span that was taken; False if it has been evicted since."""
        if self._spans.get(span.first) is not span:
            return False
        if not span.holders:
            self._wake(span.first, span.pages, FIXED)
        span.holders += 1
        return True

    def free_span(self, span: Span) -> None:
        """Gives back one hold; without holders the span is idle with its content."""
        assert self._spans.get(span.first) is span and span.holders > 0, "a span is given back but not held"
        span.holders -= 1
        if not span.holders:
            self._retire(span.first, span.pages)

    def drop_span(self, span: Span) -> None:
        """An idle span's content is not wanted any more; nothing happens if it has been evicted."""
        if self._spans.get(span.first) is span:
            assert not span.holders, "a span is dropped while it is held"
            self._evict(span.first)

    def _retire(self, first: int, pages: int) -> None:
        """Held pages become idle, as the last that did."""
        self._clock += 1
        self._state[first : first + pages] = self._clock
        self._idle[first] = None
        self._idle_pages += pages

    def _wake(self, first: int, pages: int, state: int) -> None:
        """Idle pages are held again."""
        del self._idle[first]
        self._state[first : first + pages] = state
        self._idle_pages -= pages

    def _evict(self, first: int) -> None:
        """An idle page, or an idle span, becomes blank."""
        span = self._spans.pop(first, None)
        pages = 1 if span is None else span.pages
        del self._idle[first]
        self._idle_pages -= pages
        if span is None:
            del self._pages[self._keys.pop(first)]
        for page in range(first, first + pages):
            self._make_blank(page)
        if span is not None:
            span.evicted()

    def _move(self, page: int, to: int) -> None:
        """What `page` held is at `to`, which was just taken."""
        self._holders[to] = self._holders.pop(page)
        if (key := self._keys.pop(page, None)) is not None:
            self._keys[to] = key
            self._pages[key] = to

    def _make_blank(self, page: int) -> None:
        self._state[page] = BLANK
        self._blanks += 1
        if not self._in_heap[page]:
            self._in_heap[page] = 1
            heappush(self._blank, page)

    def _pop_blank(self) -> int:
        """The lowest blank page, now held."""
        while True:
            page = heappop(self._blank)
            self._in_heap[page] = 0
            if self._state[page] == BLANK:
                self._state[page] = HELD
                self._blanks -= 1
                return page

    def check_integrity(self) -> None:
        """Every page is in exactly one state, and keys, spans and pages agree."""
        spans = [set(range(span.first, span.first + span.pages)) for span in self._spans.values()]
        fixed = [pages for span, pages in zip(self._spans.values(), spans, strict=True) if span.holders]
        loose = [pages for span, pages in zip(self._spans.values(), spans, strict=True) if not span.holders]
        blank = {page for page in range(self.total) if self._state[page] == BLANK}
        idle = {page for page in self._idle if page not in self._spans}
        states = [blank, idle, set(self._holders), *spans]
        assert sum(map(len, states)) == self.total, "a page is in two states, or in none"
        assert set[int]().union(*states) == set(range(self.total)), "a page is lost, or is none of the pool's"
        assert all(self._state[page] == HELD for page in self._holders), "a held page is marked as something else"
        assert all(self._state[page] == FIXED for pages in fixed for page in pages), "a held span is not marked"
        assert {span.first for span in self._spans.values() if not span.holders} == set(self._idle) - idle
        assert self._blanks == len(blank), "blank pages are miscounted"
        assert self._idle_pages == len(idle) + sum(map(len, loose)), "idle pages are miscounted"
        ages = [int(self._state[first]) for first in self._idle]
        assert ages == sorted(set(ages)), "idle pages are out of order"
        assert blank <= set(self._blank), "a blank page cannot be found"
        assert len(self._blank) == len(set(self._blank)) == sum(self._in_heap), "the heap holds a page twice"
        assert all(count > 0 for count in self._holders.values()), "a held page has no holder"
        assert self._pages == {key: page for page, key in self._keys.items()}, "keys and pages disagree"
        assert idle <= set(self._keys), "an idle page has no key"
        assert not blank & set(self._keys), "a blank page has a key"
