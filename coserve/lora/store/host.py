"""Host copies of adapters, counted against a budget in bytes, and the order in which they leave: greedy dual, by
frequency and size (GDSF, Cherkasova 1998)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from coserve.core.types import AdapterRef
from coserve.lora.store.entry import Entry
from coserve.lora.store.packing import bytes_without_experts, packed_bytes
from coserve.model.lora import LoraWeights

K = TypeVar("K", bound=Hashable)

FIXED_BYTES = 16 << 20
"""Fixed cost of a read, as bytes: its thread, its allocations, its place in a step."""


class GreedyDual(Generic[K]):
    """Eviction order: the copy of the least value is evicted first, the least recently used one among equals.

    value = uses * (cost of a read / size) + floor, where the floor is the value of the last evicted copy, as of this
    copy's last use. As the floor rises, a copy that is no longer used is evicted in the end. Each call takes
    O(log n)."""

    def __init__(self) -> None:
        self._floor = 0.0
        self._uses: dict[K, int] = {}
        self._values: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], K]] = []
        """Heap with lazy deletion: an entry that differs from `_values` is outdated."""
        self._ticks = count()

    def used(self, key: K, size: int, uses: int = 1) -> None:
        """Count `uses` of a copy of `size` bytes; 0 for one that was only read."""
        self._uses[key] = self._uses.get(key, 0) + uses
        value = self._floor + max(1, self._uses[key]) * (1 + FIXED_BYTES / max(1, size))
        self._values[key] = value, next(self._ticks)
        heappush(self._heap, (self._values[key], key))
        if len(self._heap) > 64 + 4 * len(self._values):
            self._heap = sorted((value, key) for key, value in self._values.items())

    def left(self, key: K) -> None:
        """Forget a copy."""
        self._uses.pop(key, None)
        self._values.pop(key, None)

    def pop(self, may_leave: Callable[[K], bool]) -> K | None:
        """Forget and return the least valuable copy that may leave; None: there is none."""
        kept, found = list[tuple[tuple[float, int], K]](), None
        while self._heap and found is None:
            entry = heappop(self._heap)
            if self._values.get(entry[1]) != entry[0]:
                continue
            if may_leave(entry[1]):
                found = entry[1]
                self._floor = entry[0][0]
                self.left(found)
            else:
                kept.append(entry)
        for entry in kept:
            heappush(self._heap, entry)
        return found


class HostCopies:
    """All host copies, and which of them leaves next."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes, at least one. Only idle copies leave: those that requests need, and pinned ones, may exceed
        it."""
        assert limit >= 1, f"expected a budget of at least one byte, got {limit}"
        self.limit, self.bytes, self.largest = limit, 0, 0
        """`bytes`: of all copies; `largest`: of the largest one so far."""
        self._order = GreedyDual[AdapterRef]()

    def add(self, entry: Entry, weights: LoraWeights) -> None:
        assert entry.host is None, f"{entry.ref} has a host copy"
        entry.host = weights
        entry.size, entry.without_experts = packed_bytes(weights), bytes_without_experts(weights)
        self.bytes, self.largest = self.bytes + entry.size, max(self.largest, entry.size)
        self._order.used(entry.ref, entry.size, uses=0)

    def used(self, entry: Entry) -> None:
        """Count one more use of the entry, if it has a host copy."""
        if entry.host is not None:
            self._order.used(entry.ref, entry.size)

    def remove(self, entry: Entry) -> None:
        """Drop the entry's host copy, if it has one."""
        if entry.host is not None:
            self.bytes -= entry.size
            entry.host = None
            self._order.left(entry.ref)

    def over(self, size: int) -> bool:
        """Whether `size` more bytes exceed the budget."""
        return self.bytes + size > self.limit

    def next_to_leave(self, may_leave: Callable[[AdapterRef], bool]) -> AdapterRef | None:
        """Return the adapter whose copy is to be removed next; None: none may leave."""
        return self._order.pop(may_leave)
