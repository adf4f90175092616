"""Cuts a batch for the segmented kernels, and builds its tables: once a step, shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK, SiteTable, site_table
from coserve.kernels.lora.segmented.block_sizes import PREFILL_BLOCKS, PrefillBlocks
from coserve.kernels.lora.segmented.tiles import HostTiles, Tiles, base_only_tiles, cut, upload
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair

DECODE_ROWS = (8, 16)
"""Rows of a decode tile: the first if every run fits it, else the second."""
PREFILL_TILE_ROWS = 64
"""Rows of a prefill tile."""

SitePairs = Sequence[LoraPair | None]
"""Each adapter's pair at one site."""


@dataclass(frozen=True)
class Cutting:
    """Rules for which kernels serve which batches, and the block sizes."""

    decode_max_run: int = 64
    """Longest run of one adapter in a batch that the decode kernels serve: their cost is reading weights."""
    large_batch: int = 512
    large_batch_max_run: int = 32
    """`decode_max_run` for batches of at least `large_batch` tokens, where the prefill kernels reread weights less
    often."""
    prefill: PrefillBlocks = PREFILL_BLOCKS


CUTTING = Cutting()


@dataclass(frozen=True)
class TilePlan:
    """How one batch is cut for one set of ranks."""

    tiles: Tiles
    R: int
    decode: bool
    prefill: PrefillBlocks = PREFILL_BLOCKS
    """Block sizes of the prefill and training kernels."""


@dataclass(frozen=True)
class GroupTable:
    """The table of up to `MAX_SITES` sites that read one input, for one step, and the objects that it needs alive."""

    table: SiteTable
    ranks: tuple[int, ...]
    """Each slot's largest rank."""
    a: list[Tensor]
    b: list[Tensor]
    """The pairs' b_OR (`a`: their a_RD), site by site and adapter by adapter; autograd returns their gradients.

    Empty if the kernels add the gradients to `MainGrads`.
    """
    a_totals: list[int]
    """For each site, the stored entries per column of A, over all adapters: the sum of ranks if none is
    block-diagonal."""
    b_totals: list[int]
    """For each site, the stored entries per row of B, over all adapters."""
    held: list[LoraPair]
    """The pairs whose addresses the table holds."""
    anchor: Tensor | None
    """`PreparedLora.anchor`."""


def tile_rows(segments: Segments, cutting: Cutting = CUTTING) -> tuple[int, bool]:
    """Return (rows of a tile, whether the decode kernels serve this batch)."""
    longest = max((end - start for runs in segments.runs.values() for start, end in runs), default=1)
    fewest, most = DECODE_ROWS
    small = segments.tokens < cutting.large_batch
    if longest > (cutting.decode_max_run if small else cutting.large_batch_max_run):
        return PREFILL_TILE_ROWS, False
    return fewest if longest <= fewest else most, True


def plan_of(
    segments: Segments, ranks: tuple[int, ...], device: torch.device, *, train: bool, cutting: Cutting = CUTTING
) -> TilePlan:
    """Cut `segments` for all groups at which the slots' adapters have these `ranks`."""
    rows, decode = (PREFILL_TILE_ROWS, False) if train else tile_rows(segments, cutting)
    host = training_tiles(segments, ranks) if train else cut(segments, ranks, rows)
    return TilePlan(upload(host, rows, segments.tokens, device), whole_ranks(ranks), decode, cutting.prefill)


def training_tiles(segments: Segments, ranks: tuple[int, ...]) -> HostTiles:
    """Return the tiles of a training batch, which cover every row."""
    host = cut(segments, ranks, PREFILL_TILE_ROWS)
    return HostTiles([*host.tiles, *base_only_tiles(segments, host, PREFILL_TILE_ROWS)], [], host.spans)


def whole_ranks(ranks: tuple[int, ...]) -> int:
    """Return `TilePlan.R`: the largest rank, rounded up to whole blocks."""
    return -(-max(ranks) // RANK_BLOCK) * RANK_BLOCK


def tables_of(groups: Sequence[Sequence[SitePairs]], device: torch.device) -> list[GroupTable]:
    """Build the tables of all groups of sites of a step, `groups[g][site][adapter]`, in one buffer."""
    table, held = site_table([pairs for group in groups for pairs in group], device)
    summed = [pair.main_grads is not None for pair in held]
    assert all(summed) or not any(summed), "expected sums of the gradients of all pairs in a batch, or of none"
    anchor = torch.empty(0, requires_grad=True) if held and all(summed) else None
    found: list[GroupTable] = []
    first = 0
    for group in groups:
        found.append(_group_table(group, table.columns(first, len(group)), held, anchor))
        first += len(group)
    return found


def _group_table(
    pairs: Sequence[SitePairs], table: SiteTable, held: list[LoraPair], anchor: Tensor | None
) -> GroupTable:
    own = [pair for site in pairs for pair in site if pair is not None]
    assert table.sizes is not None, "expected a table of one step"
    _, a_totals, b_totals = table.sizes.sum(0).T.tolist()
    ranks = tuple(table.sizes[..., 0].amax(1).tolist())
    a, b = ([], []) if anchor is not None else ([pair.a_RD for pair in own], [pair.b_OR for pair in own])
    return GroupTable(table, ranks, a, b, a_totals, b_totals, held, anchor)
