"""Rows into micro-batches. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coserve.cancellation import unchecked

CHECKED_ROWS = 64
"""Rows between two calls of `check`."""


def pack(sizes: Sequence[int], limit: int, check: Callable[[], None] = unchecked) -> list[list[int]]:
    """Indices of `sizes` in bins of at most `limit`: each goes to the first bin with room, in order.

    A larger one stands alone. First-fit (Johnson, "Near-optimal bin packing algorithms", 1973) in O(n log n): a tree over
    the bins knows the most room in any part of them. `check` is called now and then, and may raise.
    """
    bins: list[list[int]] = []
    rooms = _Rooms()
    for index, size in enumerate(sizes):
        if index % CHECKED_ROWS == 0:
            check()
        place = rooms.first(size)
        if place is None:
            place = len(bins)
            bins.append([])
            rooms.append(limit)
        bins[place].append(index)
        rooms.take(place, size)
    return bins


class _Rooms:
    """The room left in each bin; a complete binary tree: node i holds the most of nodes 2i and 2i + 1, the leaves are the
    bins, in order, and -1 where there is none yet."""

    def __init__(self) -> None:
        self._count, self._leaves = 0, 1
        self._most = [-1, -1]

    def first(self, size: int) -> int | None:
        """The first bin with room for `size`."""
        most, node = self._most, 1
        if most[1] < size:
            return None
        while node < self._leaves:
            node *= 2
            if most[node] < size:
                node += 1
        return node - self._leaves

    def append(self, room: int) -> None:
        if self._count == self._leaves:
            self._grow()
        self._set(self._leaves + self._count, room)
        self._count += 1

    def take(self, place: int, size: int) -> None:
        node = self._leaves + place
        self._set(node, self._most[node] - size)

    def _set(self, node: int, room: int) -> None:
        most = self._most
        most[node] = room
        while node > 1:
            node //= 2
            room = max(most[2 * node], most[2 * node + 1])
            if most[node] == room:
                return
            most[node] = room

    def _grow(self) -> None:
        """Twice as many leaves."""
        level = self._most[self._leaves :] + [-1] * self._leaves
        levels = [level]
        while len(level) > 1:
            level = [max(pair) for pair in zip(level[::2], level[1::2], strict=True)]
            levels.append(level)
        self._leaves *= 2
        self._most = [-1, *(room for one in reversed(levels) for room in one)]
