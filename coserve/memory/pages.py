"""Who holds which page of the pool, and what pages that nobody holds may still be good for. No tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class PagePool:
    """`pages` pages, named 0 to pages - 1. Each is blank, held by one or more, or idle.

    A held page may be given a key that says what it holds. When its last holder gives it back, a page with a key stays
    idle with its content, and `find` hands it out again; one without is blank. A taker gets blank pages first, then the
    idle ones that nobody has held for longest: nobody ever waits for an idle page.
    """

    def __init__(self, pages: int) -> None:
        assert pages > 0, f"expected at least one page, got {pages}"
        self.total = pages
        self._blank = list(range(pages - 1, -1, -1))
        self._holders = Counter[int]()
        self._idle = dict[int, None]()
        """In the order in which their last holders left."""
        self._pages = dict[bytes, int]()
        self._keys = dict[int, bytes]()

    @property
    def free(self) -> int:
        """Pages that can be taken: blank ones and idle ones."""
        return len(self._blank) + len(self._idle)

    @property
    def idle(self) -> int:
        """Pages that nobody holds and whose content can still be found."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return len(self._holders)

    def take(self, n: int) -> list[int] | None:
        """`n` pages that nobody else holds, or None (and nothing taken) when fewer are free."""
        assert n >= 0, f"expected a count, got {n}"
        if n > self.free:
            return None
        while len(self._blank) < n:
            self._forget(next(iter(self._idle)))
        pages = [self._blank.pop() for _ in range(n)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def give(self, pages: Sequence[int]) -> None:
        """Return pages that were taken or found; giving one more often than that is a bug of the caller.

        Of those that become idle, the last ones are evicted first: what comes after a page is found only by way of it.
        """
        for page in reversed(pages):
            assert page in self._holders, f"page {page} is given back but not held"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                del self._holders[page]
                if page in self._keys:
                    self._idle[page] = None
                else:
                    self._blank.append(page)

    def label(self, page: int, key: bytes) -> None:
        """From now on `find` knows a held page by `key`: its content is complete and will not change while it has it.

        If another page has the key already, nothing happens: one is enough.
        """
        assert page in self._holders, f"page {page} is labelled but not held"
        if key not in self._pages:
            assert page not in self._keys, f"page {page} is labelled twice"
            self._pages[key] = page
            self._keys[page] = key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the first keys, up to one that no page has; each has one more holder now."""
        found: list[int] = []
        for key in keys:
            if (page := self._pages.get(key)) is None:
                break
            self._idle.pop(page, None)
            self._holders[page] += 1
            found.append(page)
        return found

    def _forget(self, page: int) -> None:
        """An idle page becomes blank."""
        del self._idle[page]
        del self._pages[self._keys.pop(page)]
        self._blank.append(page)

    def check_integrity(self) -> None:
        """Every page is in exactly one state, and keys and pages agree."""
        blank = set(self._blank)
        assert len(blank) == len(self._blank), "a page is blank twice"
        states = [blank, set(self._idle), set(self._holders)]
        assert sum(map(len, states)) == self.total, "a page is in two states, or in none"
        assert set[int]().union(*states) == set(range(self.total)), "a page is lost, or is none of the pool's"
        assert all(count > 0 for count in self._holders.values()), "a held page has no holder"
        assert self._pages == {key: page for page, key in self._keys.items()}, "keys and pages disagree"
        assert set(self._idle) <= set(self._keys), "an idle page has no key"
        assert not blank & set(self._keys), "a blank page has a key"
