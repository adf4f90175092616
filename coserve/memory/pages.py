"""Which pages of the pool are free. Pure bookkeeping: no tensors."""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """`pages` pages, named 0 to pages - 1, each held by at most one taker at a time."""

    def __init__(self, pages: int) -> None:
        assert pages > 0, f"expected at least one page, got {pages}"
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._held)

    def take(self, n: int) -> list[int] | None:
        """`n` pages, or None (and nothing taken) when fewer are free."""
        assert n >= 0, f"expected a count, got {n}"
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        self._held.update(pages)
        return pages

    def give(self, pages: Sequence[int]) -> None:
        """Return pages that were taken; giving one twice is a bug of the caller."""
        for page in pages:
            assert page in self._held, f"page {page} is given back but not held"
            self._held.remove(page)
            self._free.append(page)

    def check_integrity(self) -> None:
        """Every page is either free or held, and only once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._held, "a page is both free and held"
        assert free | self._held == set(range(self.total)), "a page is lost, or is none of the pool's"
