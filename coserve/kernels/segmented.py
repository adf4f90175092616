"""`segmented`: our Triton kernels. Tables once a step, then two launches for all sites that read one input.

Decode batches (a few rows an adapter) and long ones (prefill, training) have kernels of their own; see
`segmented_decode`, `segmented_prefill` and `segmented_backward`. Any rank >= 1, mixed; an adapter costs its own rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coserve.kernels import segmented_launch as launch
from coserve.kernels import segmented_ops as ops
from coserve.kernels.segmented_launch import MAX_SITES
from coserve.kernels.segments import LoraPair, Segments
from coserve.kernels.tables import RANK_BLOCK, HostTiles, SiteTable, Tiles, cut, site_table, uncovered, upload

DECODE_RUN = 64
"""A batch whose longest run of one adapter is no longer goes to the decode kernels: reading weights is what costs."""
LARGE_BATCH, LARGE_RUN = 512, 32
"""From so many tokens on, runs longer than this go to the long kernels: each weight would be read for a few tokens."""
DECODE_ROWS = (8, 16)
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
        group = group_of(segments, [tuple(pairs[site]) for site in sites], x_TD.device)
        for site, y in zip(sites, _add([out[site] for site in sites], x_TD, segments, group), strict=True):
            out[site] = y
    return out


def _add(ys: list[Tensor], x_TD: Tensor, segments: Segments, group: Group) -> list[Tensor]:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    learned = (*group.a, *group.b) if group.anchor is None else (group.anchor,)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*ys, x_TD, *learned)):
        return train(ys, x_TD, plan_of(segments, group, train=True), group)
    add_(ys, x_TD, plan_of(segments, group, train=False), group.table)
    return ys


def train(ys: Sequence[Tensor], x_TD: Tensor, plan: Plan, group: Group) -> list[Tensor]:
    """The terms of one group, as fresh tensors, differentiable; `plan` is made for training."""
    if not torch.compiler.is_compiling():
        found: tuple[Tensor, ...] = Terms.apply(  # type: ignore[no-untyped-call]
            plan, group, len(ys), x_TD, group.anchor, *ys, *group.a, *group.b
        )
        return list(found)
    assert group.anchor is None, "expected gradients for autograd where torch.compile traces"
    tiles = plan.tiles
    cuts = (tiles.tiles, tiles.spans, tiles.counters)
    where = _training_table(group)
    out: list[Tensor] = ops.lora_train(ys, x_TD, group.a, group.b, group.totals, *cuts, *where, tiles.rows, plan.R)
    return out[:-1]


def _training_table(group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Addresses, ranks, scalings and starts."""
    table = group.table
    assert table.starts is not None, "expected a table made for training"
    return table.addresses, table.ranks, table.scalings, table.starts


class Terms(torch.autograd.Function):
    """`segmented_ops.lora_train` without what torch.library does around an op, which takes the host longer than all of
    its launches: a training step runs layer by layer and is not compiled."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own signature
        plan: Plan,
        group: Group,
        sites: int,
        x: Tensor,
        anchor: Tensor | None,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        """`rest`: the sites' ys, then the group's a and b."""
        tiles, table = plan.tiles, group.table
        where = (tiles.tiles, tiles.counters, table.addresses, table.ranks, table.scalings)
        *outs, h = ops.forward(rest[:sites], x, where, tiles.rows, plan.R)
        ctx.plan, ctx.group, ctx.sites = plan, group, sites
        ctx.save_for_backward(x, h)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # noqa: ANN401 - torch's own signature
        plan, group, sites = ctx.plan, ctx.group, ctx.sites
        x, h = ctx.saved_tensors
        needs, dys = ctx.needs_input_grad[3:], ops.dense(grads)
        weights_need = needs[1] or any(needs[2 + sites :])
        dx, weights = gradients(dys, x, h, plan, group, inputs_need=needs[0], weights_need=weights_need)
        return (None, None, None, dx, None, *dys, *weights)


def gradients(
    dys: Sequence[Tensor],
    x_TD: Tensor,
    h: Tensor,
    plan: Plan,
    group: Group,
    *,
    inputs_need: bool,
    weights_need: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Of the group's terms: dx, and those of its a, then of its b; None where none is needed, or where it is added to
    `MainGrads`."""
    tiles = plan.tiles
    tables = (tiles.tiles, tiles.spans, tiles.counters, *_training_table(group))
    flat = ops.gradients(
        dys, x_TD, h, group.totals, tables, tiles.rows, plan.R, inputs_need=inputs_need, weights_need=weights_need,
        sums=None if group.anchor is None else group.table.sums,
    )  # fmt: skip
    dx = flat.pop(0) if inputs_need else None
    tensors = (*group.a, *group.b)
    return dx, [*ops.cut_flat(flat, [tensor.shape for tensor in tensors])] if weights_need else [None] * len(tensors)


def add_(ys: Sequence[Tensor], x_TD: Tensor, plan: Plan, table: SiteTable) -> None:
    """Adds into ys in place. What a captured graph calls: only the contents of `plan` and `table` may change later."""
    tiles, where = plan.tiles, (table.addresses, table.ranks, table.scalings)
    if torch.compiler.is_compiling():
        if plan.decode:
            ops.lora_decode_(ys, x_TD, tiles.tiles, tiles.items, *where, tiles.rows, plan.R)
        else:
            ops.lora_long_(ys, x_TD, tiles.tiles, tiles.counters, *where, tiles.rows, plan.R)
    elif plan.decode:  # what the ops do, without what torch.library does around them
        launch.decode(list(ys), x_TD, tiles.tiles, tiles.items, *where, tiles.rows, plan.R)
    else:
        own = (tiles.tiles, tiles.counters)
        launch.long_forward(list(ys), list(ys), x_TD, *own, *where, tiles.rows, plan.R, keep=False)


def tile_rows(segments: Segments) -> tuple[int, bool]:
    """(rows of a tile, whether the decode kernels serve this batch)."""
    longest = max((end - start for runs in segments.runs().values() for start, end in runs), default=1)
    fewest, most = DECODE_ROWS
    if longest > (DECODE_RUN if segments.tokens < LARGE_BATCH else LARGE_RUN):
        return LONG_ROWS, False
    return fewest if longest <= fewest else most, True


def plan_of(segments: Segments, group: Group, *, train: bool) -> Plan:
    """How `segments` is cut for `group`; built once a step, for all groups whose adapters have the same ranks."""
    device, ranks = group.table.ranks.device, group.ranks

    def build() -> Plan:
        rows, decode = (LONG_ROWS, False) if train else tile_rows(segments)
        host = cut(segments, ranks, rows)
        if train:
            host = HostTiles([*host.tiles, *uncovered(segments, host, rows)], [], host.spans)
        R = -(-max(ranks) // RANK_BLOCK) * RANK_BLOCK
        return Plan(upload(host, rows, segments.tokens, device), R, decode)

    return segments.plan(("segmented", ranks, device, train), build)


def group_of(segments: Segments, pairs: Sequence[tuple[LoraPair | None, ...]], device: torch.device) -> Group:
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
) -> Group:
    own = [pair for site in pairs for pair in site if pair is not None]
    assert table.sizes is not None, "expected a table of one step"
    totals, ranks = table.sizes.sum(0).tolist(), tuple(table.sizes.amax(1).tolist())
    summed = [pair.main_grads is not None for pair in own]
    assert all(summed) or not any(summed), "expected sums of the gradients of all pairs in a batch, or of none"
    if own and all(summed):
        return Group(table, ranks, [], [], totals, held, segments.anchor)
    a, b = [pair.a_RD for pair in own], [pair.b_OR for pair in own]
    return Group(table, ranks, a, b, totals, held, None)
