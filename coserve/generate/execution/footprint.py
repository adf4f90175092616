"""The LoRA footprint of a step: which kernels its adapters need. And the footprints that graphs are captured for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coserve.generate.execution.graph_sizes import PARTIAL_FOOTPRINTS, graph_rank


@dataclass(frozen=True)
class LoraFootprint:
    """What a step's adapters change. A graph launches no LoRA kernels for the rest."""

    max_rank: int
    """Their largest rank, rounded up; 0: no adapters."""
    groups: frozenset[int]
    """Indices, in any layer, of the groups of sites that any of the adapters changes."""

    def covers(self, other: LoraFootprint) -> bool:
        return self.max_rank >= other.max_rank and self.groups >= other.groups


NO_ADAPTERS = LoraFootprint(0, frozenset())


class GraphFootprints:
    """The LoRA footprints that graphs are captured for: those of the steps so far, and those that were asked for."""

    def __init__(self, all_groups: frozenset[int]) -> None:
        self._all_groups = all_groups
        self._known: dict[LoraFootprint, None] = {NO_ADAPTERS: None}

    def __iter__(self) -> Iterator[LoraFootprint]:
        return iter(self._known)

    def add_rank(self, rank: int) -> None:
        """Adapters of this rank at any sites, if graphs serve the rank."""
        if (served := graph_rank(rank)) is not None:
            self._known[LoraFootprint(served, self._all_groups)] = None

    def serving(self, exact: LoraFootprint) -> LoraFootprint | None:
        """The footprint of the graphs that serve a step, which is known from now on; None: its rank is too large."""
        rank = graph_rank(exact.max_rank)
        if rank is None:
            return None
        found = LoraFootprint(rank, exact.groups)
        partial = sum(known.max_rank > 0 and known.groups != self._all_groups for known in self._known)
        if found not in self._known and partial >= PARTIAL_FOOTPRINTS:
            found = LoraFootprint(rank, self._all_groups)
        self._known[found] = None
        return found
