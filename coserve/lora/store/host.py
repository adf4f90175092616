"""Host copies of adapters, counted against a budget in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coserve.core.types import AdapterRef
from coserve.lora.store.entry import Entry
from coserve.lora.store.eviction import GreedyDual
from coserve.lora.store.packing import bytes_beside, packed_bytes
from coserve.model.lora import LoraWeights


@dataclass(frozen=True)
class HostBudget:
    """Limit of the host memory for idle adapters. Adapters that requests need, and pinned ones, are kept beyond it."""

    bytes: int

    def __post_init__(self) -> None:
        assert self.bytes >= 1, f"expected a budget of at least one byte, got {self.bytes}"


class HostCopies:
    """All host copies, and which of them leaves next."""

    def __init__(self, budget: HostBudget) -> None:
        self.limit, self.bytes = budget.bytes, 0
        self._order = GreedyDual[AdapterRef]()

    def add(self, entry: Entry, weights: LoraWeights) -> None:
        assert entry.host is None, f"{entry.ref} has a host copy"
        entry.host = weights
        entry.size, entry.beside = packed_bytes(weights), bytes_beside(weights)
        self.bytes += entry.size
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

    def over(self, size: int = 0) -> bool:
        """Whether `size` more bytes exceed the budget."""
        return self.bytes + size > self.limit

    def next_to_leave(self, may_leave: Callable[[AdapterRef], bool]) -> AdapterRef | None:
        """Return the adapter whose copy is to be removed next; None: none may leave."""
        return self._order.pop(may_leave)
