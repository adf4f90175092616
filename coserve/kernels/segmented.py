"""`segmented`: our Triton kernels. Tables once a step, then two launches for all sites that read one input.

Decode batches (a few rows an adapter) and long ones (prefill, training) have kernels of their own; see
`segmented_decode`, `segmented_prefill` and `segmented_backward`. Any rank >= 1, mixed; an adapter costs its own rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from coserve.kernels import segmented_ops as ops
from coserve.kernels.segmented_launch import MAX_SITES
from coserve.kernels.segments import LoraPair, Segments
from coserve.kernels.tables import RANK_BLOCK, HostTiles, SiteTable, Tiles, cut, site_table, uncovered, upload

DECODE_TOKENS = 256
"""Batches up to this size go to the decode kernels: there, reading weights is what costs."""
DECODE_ROWS = (8, 32)
"""Fewest and most rows of a decode tile."""
LONG_ROWS = 64
"""Rows of a long tile."""


@dataclass(frozen=True)
class Plan:
    """How one batch is cut for one set of ranks."""

    tiles: Tiles
    R: int
    decode: bool


@dataclass(frozen=True)
class Group:
    """Sites that read one input, their table for this step, and what must stay alive while it is used."""

    table: SiteTable
    pairs: tuple[tuple[LoraPair | None, ...], ...]
    held: tuple[LoraPair, ...]


def lora_add(y_TO: Tensor, x_TD: Tensor, segments: Segments, pairs: Sequence[LoraPair | None]) -> Tensor:
    """`y + scaling_a (x a_RDᵀ) b_ORᵀ` at one site; see `lora_add_group`."""
    return lora_add_group([y_TO], x_TD, segments, [pairs])[0]


def lora_add_group(
    ys: Sequence[Tensor], x_TD: Tensor, segments: Segments, pairs: Sequence[Sequence[LoraPair | None]]
) -> list[Tensor]:
    """The LoRA terms of sites that read one x: `ys[g]` and `pairs[g][adapter]` are site g's.

    Differentiable in ys, x and every a_RD and b_OR. Without gradients the result is written into ys.
    """
    out = list(ys)
    live = [site for site, own in enumerate(pairs) if x_TD.shape[0] and any(own[a] for a in segments.runs())]
    for first in range(0, len(live), MAX_SITES):
        sites = live[first : first + MAX_SITES]
        group = _group(segments, [tuple(pairs[site]) for site in sites], x_TD.device)
        for site, y in zip(sites, _add([out[site] for site in sites], x_TD, segments, group), strict=True):
            out[site] = y
    return out


def _add(ys: list[Tensor], x_TD: Tensor, segments: Segments, group: Group) -> list[Tensor]:
    a = [pair.a_RD for site in group.pairs for pair in site if pair is not None]
    b = [pair.b_OR for site in group.pairs for pair in site if pair is not None]
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    table = group.table
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*ys, x_TD, *a, *b)):
        assert table.starts is not None, "expected a table made for training"
        plan = _plan(segments, group, x_TD.device, train=True)
        totals = [sum(0 if pair is None else pair.rank for pair in site) for site in group.pairs]
        where = (table.addresses, table.ranks, table.scalings, table.starts)
        cut_rows = (plan.tiles.tiles, plan.tiles.spans)
        return ops.lora_train(ys, x_TD, a, b, totals, *cut_rows, *where, plan.tiles.rows, plan.R)[:-1]
    plan = _plan(segments, group, x_TD.device, train=False)
    add_(ys, x_TD, plan, table)
    return ys


def add_(ys: Sequence[Tensor], x_TD: Tensor, plan: Plan, table: SiteTable) -> None:
    """Adds into ys in place. What a captured graph calls: only the contents of `plan` and `table` may change later."""
    tiles = plan.tiles
    h = ops.lora_shrink(x_TD, tiles.tiles, tiles.items, table.addresses, table.ranks, tiles.rows, plan.R, plan.decode)
    where = (table.addresses, table.ranks, table.scalings)
    ops.lora_expand_(ys, h, tiles.tiles, *where, tiles.rows, plan.decode)


def tile_rows(segments: Segments) -> tuple[int, bool]:
    """(rows of a tile, whether the decode kernels serve this batch)."""
    longest = max((end - start for runs in segments.runs().values() for start, end in runs), default=1)
    if segments.tokens > DECODE_TOKENS and longest > DECODE_ROWS[1]:
        return LONG_ROWS, False
    fewest, most = DECODE_ROWS
    return max(fewest, min(most, int(triton.next_power_of_2(longest)))), True


def _plan(segments: Segments, group: Group, device: torch.device, *, train: bool) -> Plan:
    slots = zip(*group.pairs, strict=True)
    ranks = tuple(max(0 if pair is None else pair.rank for pair in slot) for slot in slots)

    def build() -> Plan:
        rows, decode = (LONG_ROWS, False) if train else tile_rows(segments)
        host = cut(segments, ranks, rows)
        if train:
            host = HostTiles([*host.tiles, *uncovered(segments, host, rows)], [], host.spans)
        R = -(-max(ranks) // RANK_BLOCK) * RANK_BLOCK
        return Plan(upload(host, rows, device), R, decode)

    return segments.plan(("segmented", ranks, device, train), build)


def _group(segments: Segments, pairs: list[tuple[LoraPair | None, ...]], device: torch.device) -> Group:
    def build() -> Group:
        table, held = site_table(pairs, device)
        return Group(table, tuple(pairs), tuple(held))

    return segments.plan(("group", device, *(id(pair) for site in pairs for pair in site)), build)
