"""Which GEMM kernel runs the stacked weights of a group of sites, chosen by measurement at start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from coserve.kernels.gemm import gemv, skinny
from coserve.kernels.gemm.skinny import Shape
from coserve.kernels.lora.types import StackedWeights

MEASURED = 8
"""Weights of one shape that are read in turn while measuring: more than the L2 cache holds."""


@dataclass(frozen=True)
class GemmOutput:
    y: Tensor
    """(T, O)."""
    workspace: Tensor | None
    """Busy until the kernel ends, where it allows early launch: the next kernel may start as soon as x is readable. None: it
    does not."""


@dataclass(frozen=True)
class GemmChoice:
    """Where our kernels are faster than torch's GEMM, and with which shapes; empty: nowhere."""

    gemv: Mapping[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    """Shapes of our GEMV for one row, by inputs and each site's outputs."""
    skinny: Mapping[tuple[int, int, int], Shape] = field(default_factory=dict)
    """Shapes of our skinny GEMM for 2 to 64 rows, by most rows, inputs and all outputs."""
    counters: Tensor | None = None
    """`skinny.make_counters`."""

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> GemmOutput:
        """(T, O): `x Wᵀ + bias`."""
        if self.counters is not None and x_TD.stride(1) == 1:
            rows = skinny.rows_of(x_TD.shape[0])
            if rows and (shape := self.skinny.get((rows, x_TD.shape[1], weight_OD.shape[0]))):
                return GemmOutput(*skinny.skinny_gemm(x_TD, weight_OD, bias_O, self.counters, shape))
        return GemmOutput(functional.linear(x_TD, weight_OD, bias_O), None)


@torch.no_grad()
def measure_gemms(inputs: Iterable[StackedWeights], device: torch.device) -> GemmChoice:
    """The fastest kernels for the stacked weights of a base, on a GPU."""
    kinds: dict[tuple[int, ...], list[Tensor]] = {}
    for stacked in inputs:
        if len(found := kinds.setdefault((stacked.weight.shape[1], *stacked.sizes), [])) < MEASURED:
            found.append(stacked.weight)
    if not kinds:
        return GemmChoice()
    counters = skinny.make_counters(max(len(found[0]) for found in kinds.values()), device)
    one_row = {kind: gemv.fastest(found, kind[1:]) for kind, found in kinds.items()}
    more_rows = {
        (rows, kind[0], len(found[0])): skinny.fastest(found, counters, rows)
        for kind, found in kinds.items()
        for rows in skinny.ROWS
    }
    return GemmChoice(
        {kind: shape for kind, shape in one_row.items() if shape is not None},
        {kind: shape for kind, shape in more_rows.items() if shape is not None},
        counters,
    )
