"""Trains all sites that read one input together: one GEMM of their stacked weights, one LoRA shrink, and gradients of
the input summed in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coserve.kernels.lora.segmented import launch_prefill
from coserve.kernels.lora.segmented.gradients import dense, gradients
from coserve.kernels.lora.segmented.plan import GroupTable, TilePlan
from coserve.kernels.lora.types import FrozenWeight


def linear_group(
    x_TD: Tensor, stacked: FrozenWeight, plan: TilePlan, group: GroupTable, live: list[int]
) -> tuple[Tensor, ...]:
    """Return each site's `x Wᵀ + bias + scaling (x Aᵀ) Bᵀ`: (T, O) each, columns of one tensor.

    `live`: indices of `group`'s sites among those of `stacked`; the others have no terms. `plan` is made for training.
    Differentiable in x and every a_RD and b_OR, not in the weights.
    """
    found: tuple[Tensor, ...] = LinearGroup.apply(  # type: ignore[no-untyped-call]
        stacked, plan, group, live, x_TD, group.anchor, *group.a, *group.b
    )
    return found


def forward(
    x_TD: Tensor, stacked: FrozenWeight, plan: TilePlan, group: GroupTable, live: list[int], *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs of `linear_group` concatenated to (T, ΣO), and with `keep` the shrink that the backward
    needs."""
    y_TO = stacked.linear(x_TD)
    ys = _outputs(y_TO, stacked)
    own = [ys[site] for site in live]
    return y_TO, launch_prefill.prefill(own, own, x_TD, plan, group.table, keep=keep)


def backward(
    dy_TO: Tensor,
    x_TD: Tensor,
    h_GTR: Tensor,
    stacked: FrozenWeight,
    plan: TilePlan,
    group: GroupTable,
    live: list[int],
) -> Tensor:
    """Return the gradient of x; add the pairs' gradients to their `MainGrads`."""
    assert group.anchor is not None, "expected pairs with sums of gradients"
    dys = dense(_outputs(dy_TO, stacked))
    own = [dys[site] for site in live]
    dx_TD, _ = gradients(own, x_TD, h_GTR, plan, group, inputs_need=True, weights_need=True)
    assert dx_TD is not None, "expected a gradient"
    return stacked.add_backward(dx_TD, dy_TO)


class LinearGroup(torch.autograd.Function):
    """The autograd function of `linear_group`. It sums gradients of x in place; torch would add those of each site's
    product and terms one by one."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own signature
        stacked: FrozenWeight,
        plan: TilePlan,
        group: GroupTable,
        live: list[int],
        x: Tensor,
        anchor: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        """`weights`: the group's a, then its b."""
        y, h = forward(x, stacked, plan, group, live, keep=True)
        ys = _outputs(y, stacked)
        ctx.stacked, ctx.plan, ctx.group, ctx.live = stacked, plan, group, live
        ctx.save_for_backward(x, h)
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # noqa: ANN401 - torch's own signature
        stacked, plan, group = ctx.stacked, ctx.plan, ctx.group
        x, h = ctx.saved_tensors
        needs, dys = ctx.needs_input_grad[4:], dense(grads)
        own = [dys[site] for site in ctx.live]
        dx, weights = gradients(own, x, h, plan, group, inputs_need=needs[0], weights_need=any(needs[1:]))
        if dx is not None:
            stacked.add_backward_of_sites(dx, dys)
        return (None, None, None, None, dx, None, *weights)


def _outputs(y_TO: Tensor, stacked: FrozenWeight) -> tuple[Tensor, ...]:
    return tuple(torch.split(y_TO, list(stacked.sizes), 1)) if len(stacked.sizes) > 1 else (y_TO,)
