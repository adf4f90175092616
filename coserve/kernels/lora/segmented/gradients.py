"""Gradients of the segmented LoRA terms: runs the backward kernels and splits their flat results into matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.kernels.lora.segmented import launch_backward
from coserve.kernels.lora.segmented.plan import GroupTable, TilePlan


def gradients(
    dys: Sequence[Tensor],
    x_TD: Tensor,
    h_GTR: Tensor,
    plan: TilePlan,
    group: GroupTable,
    *,
    inputs_need: bool,
    weights_need: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the gradients of one group's terms: dx (T, D), then those of every a_RD and every b_OR, site by site.

    `dys`: the gradient of each site's output (T, O). `h_GTR`: the forward's shrink. Sums are in fp32. A gradient is
    None if it is not needed, or if the kernels add it to the pair's `MainGrads`.
    """
    g_GTR = launch_backward.shrink_b(dys, plan, group.table)
    dx_TD = launch_backward.expand_a(g_GTR, x_TD.shape[1], plan, group.table) if inputs_need else None
    tensors = (*group.a, *group.b)
    if not weights_need:
        return dx_TD, [None] * len(tensors)
    where, into_sums = (plan, group.table), group.anchor is not None
    flat = launch_backward.outer(x_TD, g_GTR, group.a_totals, *where, into_sums=into_sums)
    for site, dy in enumerate(dys):
        h_1TR, total = h_GTR[site : site + 1], [group.b_totals[site]]
        flat += launch_backward.outer(dy, h_1TR, total, *where, of_b=site, into_sums=into_sums)
    return dx_TD, [*_cut_flat(flat, [tensor.shape for tensor in tensors])]


def dense(dys: Sequence[Tensor]) -> list[Tensor]:
    """Return the same tensors, copied if their columns are not dense."""
    return [dy if dy.stride(1) == 1 else dy.contiguous() for dy in dys]


def _cut_flat(flats: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the matrices of `shapes`, in order, that lie one after another in each of `flats`."""
    pieces: list[Tensor] = []
    for flat in flats:
        left, own = flat.numel(), list[torch.Size]()
        while left:
            own.append(shapes[len(pieces) + len(own)])
            left -= own[-1].numel()
        if len({width for _, width in own}) == 1:  # neighbouring rows: one view serves all
            pieces += torch.split(flat.view(-1, own[0][1]), [rows for rows, _ in own])
        else:
            parts = torch.split(flat, [shape.numel() for shape in own])
            pieces += [part.view(shape) for part, shape in zip(parts, own, strict=True)]
    return pieces
