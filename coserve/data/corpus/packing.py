"""First-fit packing of rows into micro-batches. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coserve.core.cancellation import unchecked

CHECK_INTERVAL = 64
"""Rows between two calls of `check`."""


def pack(
    sizes: Sequence[int], limit: int, check: Callable[[], None] = unchecked, *, rows: int | None = None
) -> list[list[int]]:
    """Pack the indices of `sizes` into bins of at most `limit` tokens and `rows` rows (None: any number). Each goes, in
    order, to the first bin with space for it.

    A size above `limit` gets its own bin. First-fit (Johnson, "Near-optimal bin packing algorithms", 1973) in O(n log
    n). `check` is called every `CHECK_INTERVAL` rows and may raise.
    """
    bins: list[list[int]] = []
    free = _FreeTokens()
    for index, size in enumerate(sizes):
        if index % CHECK_INTERVAL == 0:
            check()
        found = free.first_fit(size)
        if found is None:
            found = len(bins)
            bins.append([])
            free.append(limit)
        bins[found].append(index)
        free.subtract(found, limit if len(bins[found]) == rows else size)  # a bin with all its rows has no space left
    return bins


class _FreeTokens:
    """Free tokens of each bin, in a max segment tree: node i is the maximum of nodes 2i and 2i + 1. The leaves are the
    bins in order; a leaf without a bin is -1."""

    def __init__(self) -> None:
        self._count, self._leaves = 0, 1
        self._most = [-1, -1]

    def first_fit(self, size: int) -> int | None:
        """Return the first bin with at least `size` free tokens."""
        most, node = self._most, 1
        if most[1] < size:
            return None
        while node < self._leaves:
            node *= 2
            if most[node] < size:
                node += 1
        return node - self._leaves

    def append(self, free: int) -> None:
        if self._count == self._leaves:
            self._double()
        self._set(self._leaves + self._count, free)
        self._count += 1

    def subtract(self, index: int, size: int) -> None:
        node = self._leaves + index
        self._set(node, self._most[node] - size)

    def _set(self, node: int, free: int) -> None:
        most = self._most
        most[node] = free
        while node > 1:
            node //= 2
            free = max(most[2 * node], most[2 * node + 1])
            if most[node] == free:
                return
            most[node] = free

    def _double(self) -> None:
        level = self._most[self._leaves :] + [-1] * self._leaves
        levels = [level]
        while len(level) > 1:
            level = [max(pair) for pair in zip(level[::2], level[1::2], strict=True)]
            levels.append(level)
        self._leaves *= 2
        self._most = [-1, *(free for one in reversed(levels) for free in one)]
