"""Chooses the GEMM kernels for the stacked weights of groups of sites, by measurement at start."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from coserve.core.validation import decode_json
from coserve.kernels.gemm import gemv, skinny
from coserve.kernels.gemm.skinny import Shape
from coserve.kernels.lora.types import FrozenWeight
from coserve.kernels.quantized import fp8
from coserve.kernels.quantized.weights import Nf4Weight, QuantizedWeight

L2_BYTES = 200 << 20
"""Larger than any GPU's L2 cache. GEMMs are measured over this many bytes of weights, because a step reads all weights
from HBM."""

MEASURED = 8
"""Most weights of one shape that a measurement cycles through."""


@dataclass(frozen=True)
class GemmOutput:
    y: Tensor
    """(T, O)."""
    workspace: tuple[Tensor, ...] | None
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
        found = self._own(x_TD, weight_OD, bias_O, None, before_shrink)
        return GemmOutput(functional.linear(x_TD, weight_OD, bias_O), None) if found is None else found

    def quantized_linear(self, x_TD: Tensor, weights: QuantizedWeight, *, before_shrink: bool = False) -> GemmOutput:
        """Compute `linear` with quantised weights. Our kernels read FP8 weights; `fp8.rounds` tells whether they round
        x."""
        found, scale_O = None, weights.row_scales
        if scale_O is not None and x_TD.dtype == weights.dtype:
            found = self._own(x_TD, weights.weight, weights.bias, scale_O, before_shrink)
        return GemmOutput(weights.linear(x_TD), None) if found is None else found

    def _own(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, scale_O: Tensor | None, before_shrink: bool
    ) -> GemmOutput | None:
        """Return the output of one of our kernels, if one was chosen for this shape."""
        (rows, inputs), outputs = x_TD.shape, weight_OD.shape[0]
        if self.counters is not None and x_TD.stride(1) == 1 and (rows > 1 or before_shrink):
            shape = self.skinny.get((skinny.rows_of(rows) or 0, inputs, outputs))
            if shape is not None:
                rounded = scale_O is not None and fp8.rounds(x_TD)
                own = skinny.skinny_gemm(x_TD, weight_OD, bias_O, self.counters, shape, scale_O, rounded=rounded)
                return GemmOutput(*own)
        if rows == 1 and (one := self.gemv.get((inputs, outputs))):
            return GemmOutput(gemv.gemv(x_TD[0], weight_OD, bias_O, one, scale_O).view(1, -1), None)
        return None


@torch.no_grad()
def run_gemms(inputs: Iterable[FrozenWeight], device: torch.device, rows: Sequence[int]) -> None:
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
    inputs: Iterable[FrozenWeight], device: torch.device, rows: Sequence[int] = (1, *skinny.ROWS)
) -> GemmChoice:
    """Measure the fastest kernels for the stacked weights of a base, on a GPU. `rows`: a subset of 1 and
    `skinny.ROWS`."""
    kinds = _kinds(inputs)
    if not kinds:
        return GemmChoice()
    counters = _counters(kinds, device)
    one_row = {_shape(found): gemv.fastest(found) for found in kinds.values()} if 1 in rows else {}
    more_rows: dict[tuple[int, int, int], Shape] = {}
    for found, most in itertools.product(kinds.values(), (most for most in skinny.ROWS if most in rows)):
        if (best := skinny.fastest(found, counters, most)) is not None:
            more_rows[most, *_shape(found)] = best
    return GemmChoice({kind: shape for kind, shape in one_row.items() if shape is not None}, more_rows, counters)


class SavedGemms(msgspec.Struct, frozen=True):
    """A choice as stored on disk, made at `rows` for weights of these `kinds`."""

    rows: list[int]
    kinds: list[list[int]]
    """For each kind, its inputs and each site's outputs."""
    gemv: list[tuple[tuple[int, int], tuple[int, int]]]
    skinny: list[tuple[tuple[int, int, int], Shape]]


def save_gemms(path: Path, choice: GemmChoice, inputs: Iterable[FrozenWeight], rows: Sequence[int]) -> None:
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


def load_gemms(paths: Iterable[Path], inputs: Iterable[FrozenWeight], device: torch.device) -> GemmChoice | None:
    """Return the union of the choices in these files, skipping files that are missing, damaged or for other weights.

    None if no file is left.
    """
    kinds = _kinds(inputs)
    one_row: dict[tuple[int, int], tuple[int, int]] = {}
    more_rows: dict[tuple[int, int, int], Shape] = {}
    wide, fits = {_shape(found) for found in kinds.values()}, False
    for path in paths:
        try:
            saved = decode_json(path.read_bytes(), SavedGemms)
        except (OSError, msgspec.DecodeError):
            continue
        known = all(kind in wide and shape in gemv.shapes_of(kind[0]) for kind, shape in saved.gemv) and all(
            shape in (*skinny.SHAPES, *skinny.WIDE_SHAPES, *skinny.ROUNDED_SHAPES)
            and rows in skinny.ROWS
            and (inputs_, outputs) in wide
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


def _kinds(inputs: Iterable[FrozenWeight]) -> dict[tuple[int, ...], list[FrozenWeight]]:
    """Group weights by inputs and each site's outputs; keep a few of each kind. NF4 weights are left out: there are no
    kernels to choose from."""
    kinds: dict[tuple[int, ...], list[FrozenWeight]] = {}
    for stacked in inputs:
        if isinstance(stacked, Nf4Weight):
            continue
        if len(found := kinds.setdefault((stacked.in_features, *stacked.sizes), [])) < MEASURED:
            found.append(stacked)
    return kinds


def _shape(found: Sequence[FrozenWeight]) -> tuple[int, int]:
    """Return the inputs and the total outputs of weights of one kind."""
    return found[0].in_features, sum(found[0].sizes)


def _counters(kinds: Mapping[tuple[int, ...], Sequence[FrozenWeight]], device: torch.device) -> Tensor:
    return skinny.make_counters(max(_shape(found)[1] for found in kinds.values()), device)


def gemm_cases(stacked: Sequence[FrozenWeight]) -> list[FrozenWeight]:
    """Return, for each shape, enough weights, including copies, to exceed the L2 cache."""
    return [one for kind in _kinds(stacked).values() for one in _exceeding_l2(kind)]


def _exceeding_l2(kind: Sequence[FrozenWeight]) -> list[FrozenWeight]:
    """The weights of one shape, with copies so that they exceed the L2 cache together (at most `MEASURED`)."""
    size = kind[0].weight.numel() * kind[0].weight.element_size()
    copies = min(MEASURED, -(-L2_BYTES // size)) - len(kind)
    return [*kind, *(replace(kind[0], weight=kind[0].weight.clone()) for _ in range(copies))]
