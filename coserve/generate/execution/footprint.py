"""The LoRA footprint of a step: which kernels its adapters need. And the footprints that graphs are captured for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from coserve.generate.execution.graph_sizes import PARTIAL_FOOTPRINTS, graph_rank


@dataclass(frozen=True)
class LoraFootprint:
    """What a step's adapters change. A graph launches no LoRA kernels for the rest."""

    max_rank: int
    """Their largest rank, rounded up; 0: no adapters."""
    groups: frozenset[int]
    """Indices, in any layer, of the groups of sites that any of the adapters changes."""
    local: bool = True
    """Whether some of them are computed by each GPU by itself."""
    sharded: bool = False
    """Whether some of them are fully sharded (`slora`): they have launches of their own, and collectives."""

    def covers(self, other: LoraFootprint) -> bool:
        enough = self.max_rank >= other.max_rank and self.groups >= other.groups
        return enough and self.local >= other.local and self.sharded >= other.sharded


NO_ADAPTERS = LoraFootprint(0, frozenset())


class GraphFootprints:
    """The LoRA footprints that graphs are captured for: those of the steps so far, and those that were asked for."""

    def __init__(self, all_groups: frozenset[int], *, sharded: bool = False) -> None:
        """`sharded`: adapters that are asked for by their rank are fully sharded."""
        self._all_groups, self._sharded = all_groups, sharded
        self._known: dict[LoraFootprint, None] = {NO_ADAPTERS: None}

    def __iter__(self) -> Iterator[LoraFootprint]:
        return iter(self._known)

    def add_rank(self, rank: int) -> None:
        """Adapters of this rank at any sites, if graphs serve the rank."""
        if (served := graph_rank(rank)) is not None:
            self._known[self.of_rank(served)] = None

    def of_rank(self, rank: int) -> LoraFootprint:
        """Of adapters up to a rank at all sites; 0: none."""
        kinds = not self._sharded, self._sharded
        return LoraFootprint(rank, self._all_groups, *kinds) if rank else NO_ADAPTERS

    def serving(self, exact: LoraFootprint) -> LoraFootprint | None:
        """The footprint of the graphs that serve a step, which is known from now on; None: its rank is too large."""
        rank = graph_rank(exact.max_rank)
        if rank is None:
            return None
        found = replace(exact, max_rank=rank)
        partial = sum(known.max_rank > 0 and known.groups != self._all_groups for known in self._known)
        if found not in self._known and partial >= PARTIAL_FOOTPRINTS:
            found = replace(found, groups=self._all_groups)
        self._known[found] = None
        return found
