"""Adds the terms of one group of sites in two launches: differentiable (`train`) or in place (`add_`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coserve.kernels.lora.segmented import launch_decode, launch_prefill
from coserve.kernels.lora.segmented.adapter_table import SiteTable
from coserve.kernels.lora.segmented.gradients import dense, gradients
from coserve.kernels.lora.segmented.plan import GroupTable, TilePlan


def train(ys: Sequence[Tensor], x_TD: Tensor, plan: TilePlan, group: GroupTable) -> list[Tensor]:
    """Return `ys` plus the terms of one group, as new tensors, differentiable; `plan` is made for training."""
    found: tuple[Tensor, ...] = LoraTerms.apply(  # type: ignore[no-untyped-call]
        plan, group, len(ys), x_TD, group.anchor, *ys, *group.a, *group.b
    )
    return list(found)


class LoraTerms(torch.autograd.Function):
    """The autograd function of `y_g + scaling (x A_gᵀ) B_gᵀ` for the sites of a group.

    Not an op of torch.library, whose overhead on the host exceeds all launches of this function.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own signature
        plan: TilePlan,
        group: GroupTable,
        sites: int,
        x: Tensor,
        anchor: Tensor | None,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        """`rest`: the sites' ys, then the group's a, then its b."""
        ys = rest[:sites]
        outs = [torch.empty_like(y) for y in ys]
        h = launch_prefill.prefill(ys, outs, x, plan, group.table, keep=True)
        ctx.plan, ctx.group, ctx.sites = plan, group, sites
        ctx.save_for_backward(x, h)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # noqa: ANN401 - torch's own signature
        plan, group, sites = ctx.plan, ctx.group, ctx.sites
        x, h = ctx.saved_tensors
        needs, dys = ctx.needs_input_grad[3:], dense(grads)
        weights_need = needs[1] or any(needs[2 + sites :])
        dx, weights = gradients(dys, x, h, plan, group, inputs_need=needs[0], weights_need=weights_need)
        return (None, None, None, dx, None, *dys, *weights)


def add_(ys: Sequence[Tensor], x_TD: Tensor, plan: TilePlan, table: SiteTable, *, overlapped: bool = False) -> None:
    """Add the terms into ys in place. Can be captured: the contents of `plan` and `table` may change between replays.

    `overlapped`: see `PreparedLora.add_`.
    """
    if plan.decode:
        launch_decode.decode(ys, x_TD, plan, table, overlapped=overlapped)
    else:
        launch_prefill.prefill(ys, ys, x_TD, plan, table, keep=False)
