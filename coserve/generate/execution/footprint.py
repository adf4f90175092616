"""The LoRA footprint of a step: which kernels its adapters need."""

from __future__ import annotations

from dataclasses import dataclass


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
