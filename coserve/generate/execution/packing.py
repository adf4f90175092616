"""The row order of a step's sequences: grouped by adapter, sequences without an adapter last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coserve.generate.execution.interface import BASE_ONLY, SequenceInput


@dataclass(frozen=True)
class PackedStep:
    """A step's sequences in the order of their rows."""

    sequences: list[SequenceInput]
    bounds: tuple[int, ...]
    """(S + 1) the first row of each segment, then the number of rows."""
    adapters: tuple[int, ...]
    """Adapter index of each segment, S or S - 1 of them: a last segment without an adapter is left out."""

    def segment_adapters(self, places: Iterable[int]) -> tuple[int, ...]:
        """(S) the value of `Segments.adapters`, given the adapters' `places`; -1 for the base without an adapter."""
        return (*places, *[-1] * (len(self.bounds) - 1 - len(self.adapters)))


def by_adapter(sequences: Iterable[SequenceInput]) -> list[list[SequenceInput]]:
    """Group the sequences by adapter, in order of first appearance; those without an adapter last."""
    groups: dict[int, list[SequenceInput]] = {}
    for own in sequences:
        groups.setdefault(own.adapter, []).append(own)
    if BASE_ONLY in groups:
        groups[BASE_ONLY] = groups.pop(BASE_ONLY)
    return list(groups.values())


def pack(groups: Iterable[list[SequenceInput]]) -> PackedStep:
    """Pack groups of `by_adapter` into one batch."""
    sequences, bounds, adapters = list[SequenceInput](), [0], list[int]()
    for group in groups:
        sequences.extend(group)
        bounds.append(bounds[-1] + sum(own.run.tokens for own in group))
        if group[0].adapter != BASE_ONLY:
            adapters.append(group[0].adapter)
    return PackedStep(sequences, tuple(bounds), tuple(adapters))
