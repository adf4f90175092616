"""Which kernel takes a step's rows through the sites of one input, chosen by measurement at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from coserve.kernels.gemm import gemv as single
from coserve.kernels.gemm import skinny as few
from coserve.model.base import Base

MEASURED = 8
"""Weights of one kind that are read in turn while measuring: more than the cache holds."""


@dataclass(frozen=True)
class Product:
    y: Tensor
    """(T, O)."""
    scratch: Tensor | None
    """Memory that the product's kernel may still use while the next kernel runs, which may start once x is complete; None:
    it starts behind this one."""


@dataclass(frozen=True)
class Products:
    """Kernels of ours where they are faster than torch's own product; nothing: torch's own for all."""

    single: Mapping[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    """How `kernels.single` runs one row, by inputs and each site's outputs."""
    few: Mapping[tuple[int, int, int], few.Shape] = field(default_factory=dict)
    """How `kernels.few` runs 2 to 64 rows, by most rows, inputs and all outputs."""
    counters: Tensor | None = None
    """What programs of `kernels.few` wait on."""

    def project(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Product:
        """(T, O): `x Wᵀ + bias`."""
        if self.counters is not None and x_TD.stride(1) == 1:
            rows = few.rows_of(x_TD.shape[0])
            if rows and (shape := self.few.get((rows, x_TD.shape[1], weight_OD.shape[0]))):
                return Product(*few.skinny_gemm(x_TD, weight_OD, bias_O, self.counters, shape))
        return Product(functional.linear(x_TD, weight_OD, bias_O), None)


@torch.no_grad()
def measured(base: Base) -> Products:
    """The fastest kernels for the shared inputs of a base on a GPU (`LoraSites.share`)."""
    kinds: dict[tuple[int, ...], list[Tensor]] = {}
    for shared in base.sites.groups():
        if len(found := kinds.setdefault((shared.weight.shape[1], *shared.sizes), [])) < MEASURED:
            found.append(shared.weight)
    if not kinds:
        return Products()
    counters = few.make_counters(max(len(found[0]) for found in kinds.values()), base.device)
    ones = {kind: single.faster(found, kind[1:]) for kind, found in kinds.items()}
    fews = {
        (rows, kind[0], len(found[0])): few.faster(found, counters, rows)
        for kind, found in kinds.items()
        for rows in few.ROWS
    }
    return Products(
        {kind: shape for kind, shape in ones.items() if shape is not None},
        {kind: shape for kind, shape in fews.items() if shape is not None},
        counters,
    )
