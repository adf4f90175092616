"""Launches of `row_kernel`: a step's only row through linear sites, LoRA terms included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coserve.kernels.gpu.device import device_info
from coserve.kernels.gpu.launcher import Launcher, options
from coserve.kernels.gpu.rounding import cdiv, next_power_of_2
from coserve.kernels.lora.segmented import row_kernel
from coserve.kernels.lora.segmented.adapter_table import SiteTable
from coserve.kernels.lora.segmented.plan import TilePlan
from coserve.kernels.lora.shrinks import ENTRIES, Shrinks

LINEAR_ROW = Launcher(row_kernel.linear_row)
MOST_RANK = 128


class RowShape(NamedTuple):
    """Outputs and LoRA ranks of a program, and its warps."""

    n: int = 4
    h: int = 2
    warps: int = 4


ROW_SHAPE = RowShape()


def serves(sizes: Sequence[int], plan: TilePlan, table: SiteTable, shape: RowShape = ROW_SHAPE) -> bool:
    """Whether `linear_row` computes sites of these outputs."""
    whole = all(size % shape.n == 0 for size in sizes[:-1])
    return whole and plan.decode and plan.R <= MOST_RANK and not table.blocked and len(sizes) == table.sites


def linear_row(
    x_D: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    sizes: Sequence[int],
    shrinks: Shrinks,
    plan: TilePlan,
    table: SiteTable,
    shape: RowShape = ROW_SHAPE,
) -> Tensor:
    """Return `weight x + bias` (O) plus the LoRA terms of the row's adapter, for sites that `serves` accepts.

    `sizes`: each site's outputs.
    """
    (O, D), sites, blocks = weight_OD.shape, table.sites, cdiv(plan.R, shape.h)
    y = torch.empty(O, dtype=x_D.dtype, device=x_D.device)
    h, last = shrinks.take()
    LINEAR_ROW(
        (sites * blocks + cdiv(O, shape.n), 1, 1),
        [
            *(x_D, weight_OD, y if bias_O is None else bias_O, y, h, last),
            *(plan.tiles.tiles, table.addresses, table.ranks, table.scalings),
        ],
        (D, O, sizes[0], sum(sizes[:2]), table.ranks.stride(0), plan.R),
        SITES=sites,
        BIAS=bias_O is not None,
        BLOCK_N=shape.n,
        BLOCK_K=next_power_of_2(D),
        BLOCK_H=shape.h,
        BLOCK_R=next_power_of_2(plan.R),
        RANK_BLOCKS=blocks,
        ENTRIES=ENTRIES,
        **options(device_info(x_D.device).early_launch, shape.warps, 1),
    )
    return y
