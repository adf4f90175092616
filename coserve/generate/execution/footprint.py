"""LoRA footprints: the LoRA kernels that a step needs, and the sets that graphs are captured for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from coserve.generate.execution.graph_sizes import PARTIAL_GROUPS, graph_rank


@dataclass(frozen=True)
class LoraFootprint:
    """Sites and ranks of a step's adapters. A graph launches no LoRA kernels beyond its footprint."""

    max_rank: int
    """Largest LoRA rank, rounded up; 0: no adapters."""
    groups: frozenset[int]
    """Indices, within a layer, of the site groups that any of the adapters changes."""
    local: bool = True
    """Whether some pairs are computed by each GPU without communication."""
    sharded: bool = False
    """Whether some pairs are fully sharded (`slora`): they need launches and collectives of their own."""
    scaled: bool = False
    """Whether some adapters are DoRA, whose rows are scaled by a launch at each site."""
    experts: bool = False
    """Whether some adapters change experts: the experts' rows are then sorted by adapter as well."""
    remote: bool = False
    """Whether LoRA servers compute experts' terms of some adapters."""

    def covers(self, other: LoraFootprint) -> bool:
        enough = self.max_rank >= other.max_rank and self.groups >= other.groups
        kinds = ("local", "sharded", "scaled", "experts")
        kept = all(getattr(self, kind) >= getattr(other, kind) for kind in kinds)
        return enough and kept and self.remote == other.remote  # servers answer the steps that they were told of


NO_ADAPTERS = LoraFootprint(0, frozenset())


class GraphFootprints:
    """The LoRA footprints that graphs are captured for: those of past steps, and those requested by rank."""

    def __init__(self, all_groups: frozenset[int], *, sharded: bool = False) -> None:
        """`sharded`: adapters requested by rank count as fully sharded."""
        self._all_groups, self._sharded = all_groups, sharded
        self._known: dict[LoraFootprint, None] = {NO_ADAPTERS: None}
        self._expected: tuple[int, frozenset[int]] = 0, frozenset()
        """The largest LoRA rank of the adapters expected so far, and the groups that any of them changes."""

    def __iter__(self) -> Iterator[LoraFootprint]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def add_rank(self, rank: int) -> None:
        """Add the footprint of adapters of this LoRA rank at any sites, if graphs serve the rank."""
        if (served := graph_rank(rank)) is not None:
            self._known[self.of_rank(served)] = None

    def add_adapter(
        self, rank: int, groups: frozenset[int], *, scaled: bool, experts: bool = False, remote: bool = False
    ) -> None:
        """Add the footprints of steps with adapters of these properties, alone and with all that were added before,
        if graphs serve the LoRA rank, unless known footprints of the same groups cover them."""
        served = graph_rank(rank) if rank else None
        if served is None:
            return
        largest, every = self._expected
        self._expected = largest, every = max(largest, served), every | groups
        mixed = replace(self.of_rank(largest), groups=every, scaled=scaled, experts=experts, remote=remote)
        for wanted in (mixed, replace(mixed, max_rank=served, groups=groups)):  # of few places, first for all steps
            found = self._allowed(wanted)
            if not any(known.groups == found.groups and known.covers(found) for known in self._known):
                self._known[found] = None

    def of_rank(self, rank: int) -> LoraFootprint:
        """The footprint of adapters up to a LoRA rank at all sites; 0: no adapters."""
        kinds = not self._sharded, self._sharded
        return LoraFootprint(rank, self._all_groups, *kinds) if rank else NO_ADAPTERS

    def serving(self, exact: LoraFootprint) -> LoraFootprint | None:
        """Return the footprint of the graphs that serve such a step, and remember it; None: its LoRA rank is too
        large."""
        rank = graph_rank(exact.max_rank)
        if rank is None:
            return None
        found = self._allowed(replace(exact, max_rank=rank))
        self._known[found] = None
        return found

    def _allowed(self, found: LoraFootprint) -> LoraFootprint:
        """Return the footprint, with more groups if too many other choices of some groups are known."""
        some = {known.groups for known in self._known if known.max_rank} - {self._all_groups}
        if found.groups in some or len(some) < PARTIAL_GROUPS:
            return found
        wider = [groups for groups in some if groups > found.groups]
        return replace(found, groups=min(wider, key=len, default=self._all_groups))
