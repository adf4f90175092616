"""How a batch is cut for the segmented kernels: once a step, shared by all layers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK, SiteTable, site_table
from coserve.kernels.lora.segmented.tiles import HostTiles, Tiles, base_only_tiles, cut, upload
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair

DECODE_MAX_RUN = 64
"""A batch whose longest run of one adapter is no longer goes to the decode kernels: reading weights is what costs."""
LARGE_BATCH, LARGE_BATCH_MAX_RUN = 512, 32
"""From so many tokens on, runs longer than this go to the prefill kernels: each weight would be read for a few tokens."""
DECODE_ROWS = (8, 16)
"""Fewest and most rows of a decode tile."""
PREFILL_TILE_ROWS = 64
"""Rows of a prefill tile."""


@dataclass(frozen=True)
class TilePlan:
    """How one batch is cut for one set of ranks."""

    tiles: Tiles
    R: int
    decode: bool


@dataclass(frozen=True)
class SiteGroup:
    """Sites that read one input, their table for this step, and what must stay alive while it is used."""

    table: SiteTable
    ranks: tuple[int, ...]
    """Each slot's largest."""
    a: list[Tensor]
    b: list[Tensor]
    """The pairs' own tensors, site by site and adapter by adapter: what gradients go to. None of them where the kernels add
    them to `MainGrads`."""
    totals: list[int]
    """Each site's ranks, summed."""
    held: list[LoraPair]
    """What the table points at."""
    anchor: Tensor | None
    """`Segments.anchor`, where the kernels add the gradients."""


def tile_rows(segments: Segments) -> tuple[int, bool]:
    """(rows of a tile, whether the decode kernels serve this batch)."""
    longest = max((end - start for runs in segments.runs().values() for start, end in runs), default=1)
    fewest, most = DECODE_ROWS
    if longest > (DECODE_MAX_RUN if segments.tokens < LARGE_BATCH else LARGE_BATCH_MAX_RUN):
        return PREFILL_TILE_ROWS, False
    return fewest if longest <= fewest else most, True


def plan_of(segments: Segments, group: SiteGroup, *, train: bool) -> TilePlan:
    """How `segments` is cut for `group`; built once a step, for all groups whose adapters have the same ranks."""
    device, ranks = group.table.ranks.device, group.ranks

    def build() -> TilePlan:
        rows, decode = (PREFILL_TILE_ROWS, False) if train else tile_rows(segments)
        host = cut(segments, ranks, rows)
        if train:
            host = HostTiles([*host.tiles, *base_only_tiles(segments, host, rows)], [], host.spans)
        R = -(-max(ranks) // RANK_BLOCK) * RANK_BLOCK
        return TilePlan(upload(host, rows, segments.tokens, device), R, decode)

    return segments.plan(("segmented", ranks, device, train), build)


def group_of(segments: Segments, pairs: Sequence[tuple[LoraPair | None, ...]], device: torch.device) -> SiteGroup:
    """The table of up to `MAX_SITES` sites that read one input: `pairs[g][adapter]`. Built once a step."""

    return segments.plan(_key(pairs, device), lambda: _group(segments, pairs, *site_table(pairs, device)))


def prepare(segments: Segments, groups: Sequence[Sequence[tuple[LoraPair | None, ...]]], device: torch.device) -> None:
    """Builds the tables of all groups of sites in one piece, `groups[g][site][adapter]`: `group_of` finds them."""
    table, held = site_table([pairs for group in groups for pairs in group], device)
    first = 0
    for group in groups:
        columns = table.columns(first, len(group))
        segments.plan(_key(group, device), partial(_group, segments, group, columns, held))
        first += len(group)


def _key(pairs: Sequence[tuple[LoraPair | None, ...]], device: torch.device) -> Hashable:
    return ("group", device, *[id(pair) for site in pairs for pair in site])


def _group(
    segments: Segments, pairs: Sequence[tuple[LoraPair | None, ...]], table: SiteTable, held: list[LoraPair]
) -> SiteGroup:
    own = [pair for site in pairs for pair in site if pair is not None]
    assert table.sizes is not None, "expected a table of one step"
    totals, ranks = table.sizes.sum(0).tolist(), tuple(table.sizes.amax(1).tolist())
    summed = [pair.main_grads is not None for pair in own]
    assert all(summed) or not any(summed), "expected sums of the gradients of all pairs in a batch, or of none"
    if own and all(summed):
        return SiteGroup(table, ranks, [], [], totals, held, segments.anchor)
    a, b = [pair.a_RD for pair in own], [pair.b_OR for pair in own]
    return SiteGroup(table, ranks, a, b, totals, held, None)
