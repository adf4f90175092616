"""Chooses the GEMM kernels for the stacked weights of groups of sites, by measurement at start."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from coserve.core.validation import decoder_of
from coserve.kernels.gemm import gemv, skinny
from coserve.kernels.gemm.skinny import Shape
from coserve.kernels.lora.types import StackedWeights

MEASURED = 8
"""Weights of one shape that a measurement cycles through, more than the L2 cache holds."""


@dataclass(frozen=True)
class GemmOutput:
    y: Tensor
    """(T, O)."""
    workspace: Tensor | None
    """Memory that is busy until the kernel ends, if the next kernel may start as soon as x is readable. Otherwise
    None."""


@dataclass(frozen=True)
class GemmChoice:
    """The shapes at which our kernels are faster than torch's GEMM, and their block sizes."""

    gemv: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """Block sizes of our GEMV for one row, by inputs and total outputs."""
    skinny: Mapping[tuple[int, int, int], Shape] = field(default_factory=dict)
    """Block sizes of our skinny GEMM for up to 64 rows, by most rows, inputs and total outputs."""
    counters: Tensor | None = None
    """Scratch from `skinny.make_counters`."""

    def linear(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, *, before_shrink: bool = False
    ) -> GemmOutput:
        """Return `x Wᵀ + bias` (T, O).

        `before_shrink`: a LoRA shrink of x follows. Overlapping it with the skinny GEMM saves more than the GEMV would.
        """
        (rows, inputs), outputs = x_TD.shape, weight_OD.shape[0]
        if self.counters is not None and x_TD.stride(1) == 1 and (rows > 1 or before_shrink):
            most = skinny.rows_of(rows)
            if most and (shape := self.skinny.get((most, inputs, outputs))):
                return GemmOutput(*skinny.skinny_gemm(x_TD, weight_OD, bias_O, self.counters, shape))
        if rows == 1 and (one := self.gemv.get((inputs, outputs))):
            return GemmOutput(gemv.gemv(x_TD[0], weight_OD, bias_O, one).view(1, -1), None)
        return GemmOutput(functional.linear(x_TD, weight_OD, bias_O), None)


@torch.no_grad()
def run_gemms(inputs: Iterable[StackedWeights], device: torch.device, rows: Sequence[int]) -> None:
    """Run each kernel that `measure_gemms` measures: see `gemv.run_each`."""
    kinds = _kinds(inputs)
    for found in kinds.values():
        if 1 in rows:
            gemv.run_each(found[0])
        for most in skinny.ROWS:
            if most in rows:
                skinny.run_each(found[0], _counters(kinds, device), most)


@torch.no_grad()
def measure_gemms(
    inputs: Iterable[StackedWeights], device: torch.device, rows: Sequence[int] = (1, *skinny.ROWS)
) -> GemmChoice:
    """Measure the fastest kernels for the stacked weights of a base, on a GPU. `rows`: a subset of 1 and
    `skinny.ROWS`."""
    kinds = _kinds(inputs)
    if not kinds:
        return GemmChoice()
    counters = _counters(kinds, device)
    one_row = {(kind[0], len(found[0])): gemv.fastest(found) for kind, found in kinds.items()} if 1 in rows else {}
    more_rows = {
        (most, kind[0], len(found[0])): skinny.fastest(found, counters, most)
        for kind, found in kinds.items()
        for most in skinny.ROWS
        if most in rows
    }
    return GemmChoice(
        {kind: shape for kind, shape in one_row.items() if shape is not None},
        {kind: shape for kind, shape in more_rows.items() if shape is not None},
        counters,
    )


class SavedGemms(msgspec.Struct, frozen=True):
    """A choice as stored on disk, made at `rows` for weights of these `kinds`."""

    rows: list[int]
    kinds: list[list[int]]
    """For each kind, its inputs and each site's outputs."""
    gemv: list[tuple[tuple[int, int], tuple[int, int]]]
    skinny: list[tuple[tuple[int, int, int], Shape]]


def save_gemms(path: Path, choice: GemmChoice, inputs: Iterable[StackedWeights], rows: Sequence[int]) -> None:
    """Write the choice atomically, for `load_gemms`."""
    saved = SavedGemms(
        rows=list(rows),
        kinds=[list(kind) for kind in _kinds(inputs)],
        gemv=list(choice.gemv.items()),
        skinny=list(choice.skinny.items()),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(msgspec.json.encode(saved))
    temporary.replace(path)


def load_gemms(paths: Iterable[Path], inputs: Iterable[StackedWeights], device: torch.device) -> GemmChoice | None:
    """Return the union of the choices in these files, skipping files that are missing, damaged or for other weights.

    None if no file is left.
    """
    kinds = _kinds(inputs)
    one_row: dict[tuple[int, int], tuple[int, int]] = {}
    more_rows: dict[tuple[int, int, int], Shape] = {}
    wide, fits = {(kind[0], len(found[0])) for kind, found in kinds.items()}, False
    for path in paths:
        try:
            saved = decoder_of(SavedGemms).decode(path.read_bytes())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        known = all(kind in wide and shape in gemv.shapes_of(kind[0]) for kind, shape in saved.gemv) and all(
            shape in skinny.SHAPES and rows in skinny.ROWS and (inputs_, outputs) in wide
            for (rows, inputs_, outputs), shape in saved.skinny
        )
        if not known or {tuple(kind) for kind in saved.kinds} != kinds.keys():
            continue
        fits = True
        one_row |= dict(saved.gemv)
        more_rows |= dict(saved.skinny)
    if not fits:
        return None
    return GemmChoice(one_row, more_rows, _counters(kinds, device)) if kinds else GemmChoice()


def _kinds(inputs: Iterable[StackedWeights]) -> dict[tuple[int, ...], list[Tensor]]:
    """Group weights by inputs and each site's outputs; keep a few of each kind."""
    kinds: dict[tuple[int, ...], list[Tensor]] = {}
    for stacked in inputs:
        if len(found := kinds.setdefault((stacked.in_features, *stacked.sizes), [])) < MEASURED:
            found.append(stacked.weight)
    return kinds


def _counters(kinds: Mapping[tuple[int, ...], Sequence[Tensor]], device: torch.device) -> Tensor:
    return skinny.make_counters(max(len(found[0]) for found in kinds.values()), device)
