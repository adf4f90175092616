"""`segmented`: our Triton kernels. Tables once a step, then two launches for all sites that read one input.

Decode batches (a few rows an adapter) and larger ones (prefill, training) have kernels of their own; see
`decode_kernel`, `prefill_kernel` and `backward_kernel`. Any rank >= 1, mixed; an adapter costs its own rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coserve.kernels.lora.segmented import launch_decode, launch_prefill
from coserve.kernels.lora.segmented.adapter_table import SiteTable
from coserve.kernels.lora.segmented.block_sizes import MAX_SITES
from coserve.kernels.lora.segmented.gradients import dense, gradients
from coserve.kernels.lora.segmented.plan import SiteGroup, TilePlan, group_of, plan_of
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair


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


def _add(ys: list[Tensor], x_TD: Tensor, segments: Segments, group: SiteGroup) -> list[Tensor]:
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    learned = (*group.a, *group.b) if group.anchor is None else (group.anchor,)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*ys, x_TD, *learned)):
        return train(ys, x_TD, plan_of(segments, group, train=True), group)
    add_(ys, x_TD, plan_of(segments, group, train=False), group.table)
    return ys


def train(ys: Sequence[Tensor], x_TD: Tensor, plan: TilePlan, group: SiteGroup) -> list[Tensor]:
    """The terms of one group added to `ys`, as fresh tensors, differentiable; `plan` is made for training."""
    found: tuple[Tensor, ...] = LoraTerms.apply(  # type: ignore[no-untyped-call]
        plan, group, len(ys), x_TD, group.anchor, *ys, *group.a, *group.b
    )
    return list(found)


class LoraTerms(torch.autograd.Function):
    """`y_g + scaling (x A_gᵀ) B_gᵀ` for the sites of a group.

    Not an op of torch.library: what that does around an op takes the host longer than all launches of this one.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own signature
        plan: TilePlan,
        group: SiteGroup,
        sites: int,
        x: Tensor,
        anchor: Tensor | None,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        """`rest`: the sites' ys, then the group's a and b."""
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
    """Adds into ys in place. What a captured graph calls: only the contents of `plan` and `table` may change later.

    `overlapped`: the kernel launched before this one is a GEMM of x that allows an early start (`decode_kernel.shrink`).
    """
    if plan.decode:
        launch_decode.decode(ys, x_TD, plan, table, overlapped=overlapped)
    else:
        launch_prefill.prefill(ys, ys, x_TD, plan, table, keep=False)
