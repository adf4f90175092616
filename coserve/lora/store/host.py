"""Host copies of adapters, counted against a budget."""

from __future__ import annotations

from dataclasses import dataclass

from coserve.lora.store.entry import Entry
from coserve.lora.store.packing import packed_bytes
from coserve.model.lora import LoraWeights


@dataclass(frozen=True)
class HostBudget:
    """Limits of the host memory for idle adapters. Adapters that requests need are kept beyond them."""

    adapters: int
    bytes: int | None = None
    """Most bytes; None: only `adapters` limits."""

    def __post_init__(self) -> None:
        assert self.adapters >= 1, f"expected a budget of at least one adapter, got {self.adapters}"


class HostCopies:
    """Number and bytes of all host copies."""

    def __init__(self, budget: HostBudget) -> None:
        self._budget = budget
        self._copies = self._bytes = 0

    def add(self, entry: Entry, weights: LoraWeights) -> None:
        assert entry.host is None, f"{entry.ref} has a host copy"
        entry.host, entry.size = weights, packed_bytes(weights)
        self._copies += 1
        self._bytes += entry.size

    def remove(self, entry: Entry) -> None:
        """Stop counting the entry's host copy, if it has one."""
        if entry.host is not None:
            self._copies -= 1
            self._bytes -= entry.size
            entry.host = None

    def fits(self, adapters: int, size: int) -> bool:
        """Whether the budget has room for so many more adapters and bytes."""
        most = self._budget.bytes
        return self._copies + adapters <= self._budget.adapters and (most is None or self._bytes + size <= most)
