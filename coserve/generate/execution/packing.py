"""The order of a step's sequences in the batch: those of one adapter side by side, those of the base alone last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coserve.generate.execution.interface import BASE_ONLY, SequenceInput


@dataclass(frozen=True)
class PackedStep:
    """Sequences in the order of their rows."""

    sequences: list[SequenceInput]
    bounds: tuple[int, ...]
    """(S + 1) first row of each segment, and the number of rows."""
    adapters: tuple[int, ...]
    """Index of each segment's adapter. A last segment without one is left out: there are S or S - 1."""

    def segment_adapters(self, places: Iterable[int]) -> tuple[int, ...]:
        """(S) what `Segments.adapters` takes, where the segments' adapters are in `places`; -1 for the base alone."""
        return (*places, *[-1] * (len(self.bounds) - 1 - len(self.adapters)))


def by_adapter(sequences: Iterable[SequenceInput]) -> list[list[SequenceInput]]:
    """Sequences of each adapter in order of its first appearance; those of the base alone come last."""
    groups: dict[int, list[SequenceInput]] = {}
    for own in sequences:
        groups.setdefault(own.adapter, []).append(own)
    if BASE_ONLY in groups:
        groups[BASE_ONLY] = groups.pop(BASE_ONLY)
    return list(groups.values())


def pack(groups: Iterable[list[SequenceInput]]) -> PackedStep:
    """The groups of `by_adapter`, or some of them, as one batch."""
    sequences, bounds, adapters = list[SequenceInput](), [0], list[int]()
    for group in groups:
        sequences.extend(group)
        bounds.append(bounds[-1] + sum(own.run.tokens for own in group))
        if group[0].adapter != BASE_ONLY:
            adapters.append(group[0].adapter)
    return PackedStep(sequences, tuple(bounds), tuple(adapters))
