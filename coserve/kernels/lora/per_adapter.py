"""`naive`: one forward of the whole base per adapter, the paper's first baseline (§4.3.2).

The split happens above the sites: a step cuts its batch with `split` and runs one forward a group. Within a group's
forward, at one site, there is nothing to tell it from `grouped`.
"""

from __future__ import annotations

from dataclasses import dataclass

from coserve.kernels.lora.segments import Segments


@dataclass(frozen=True)
class Group:
    """One adapter's share of a packed batch."""

    adapter: int
    """-1: the tokens that use the base alone."""
    members: tuple[int, ...]
    """Indices of the group's segments in the batch, in order."""
    rows: tuple[int, ...]
    """Indices of the group's tokens in the batch, in order."""
    segments: Segments
    """The group as a batch of its own: the same segments packed together; `adapters` index the step's, as before."""


def split(segments: Segments) -> list[Group]:
    """Groups by adapter in order of first appearance; every segment, empty ones too, is in exactly one group."""
    members: dict[int, list[int]] = {}
    for index, adapter in enumerate(segments.adapters):
        members.setdefault(adapter, []).append(index)
    return [_group(segments, adapter, own) for adapter, own in members.items()]


def _group(segments: Segments, adapter: int, members: list[int]) -> Group:
    rows: list[int] = []
    bounds = [0]
    for index in members:
        rows.extend(range(segments.bounds[index], segments.bounds[index + 1]))
        bounds.append(len(rows))
    return Group(adapter, tuple(members), tuple(rows), Segments(tuple(bounds), (adapter,) * len(members)))
