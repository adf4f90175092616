"""Host copies of adapters, counted against a budget."""

from __future__ import annotations

from dataclasses import dataclass

from coserve.lora.store.entry import Entry
from coserve.lora.store.packing import packed_bytes
from coserve.model.lora import LoraWeights


@dataclass(frozen=True)
class HostBudget:
    """Host memory for idle adapters. Adapters that requests need stay beyond it."""

    adapters: int
    bytes: int | None = None
    """None: bounded by `adapters` alone."""

    def __post_init__(self) -> None:
        assert self.adapters >= 1, f"expected a budget of at least one adapter, got {self.adapters}"


class HostCopies:
    """How many host copies there are, and of how many bytes."""

    def __init__(self, budget: HostBudget) -> None:
        self._budget = budget
        self._copies = self._bytes = 0

    def add(self, entry: Entry, weights: LoraWeights) -> None:
        assert entry.host is None, f"{entry.ref} has a host copy"
        entry.host, entry.size = weights, packed_bytes(weights)
        self._copies += 1
        self._bytes += entry.size

    def remove(self, entry: Entry) -> None:
        """Nothing happens if it has none."""
        if entry.host is not None:
            self._copies -= 1
            self._bytes -= entry.size
            entry.host = None

    def fits(self, adapters: int, size: int) -> bool:
        """Whether the budget holds so many more adapters and bytes."""
        most = self._budget.bytes
        return self._copies + adapters <= self._budget.adapters and (most is None or self._bytes + size <= most)
