"""Puts the pairs of experts from an adapter's file into the order of `LoraPair`: expert after expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coserve.core.types import SiteSpec
from coserve.lora.files.experts import ALL, ExpertTensors, Matrices
from coserve.lora.files.tensorfile import TensorEntry

Read = Callable[[TensorEntry], Tensor]


def expert_matrices(own: ExpertTensors, spec: SiteSpec, read: Read) -> tuple[Tensor, Tensor]:
    """Return one parameter's a_RD (E R, D) and b_OR (E O, R), in the file's dtype."""
    if own.fused:
        part = own.parts[0]
        a_ERD = read(part.a[ALL]).view(spec.experts, part.rank, -1)
        b_EOR = read(part.b[ALL]).view(-1, part.rank, spec.experts).permute(2, 0, 1)
        if own.swapped:
            a_ERD, b_EOR = b_EOR.mT, a_ERD.mT
        return a_ERD.flatten(0, 1), b_EOR.flatten(0, 1)
    halves = [[_stacked(one, spec.experts, read) for one in (part.a, part.b)] for part in own.parts]
    a_ERD = torch.cat([a for a, _ in halves], 1)
    b_EOR = torch.zeros(spec.experts, spec.out_features, own.rank, dtype=a_ERD.dtype)
    first = 0
    for part, (_, b_EHR) in zip(own.parts, halves, strict=True):
        rows = slice(None)
        if part.half is not None and spec.halves == "interleaved":
            rows = slice(part.half, None, 2)
        elif part.half is not None:
            rows = slice(part.half * b_EHR.shape[1], (part.half + 1) * b_EHR.shape[1])
        b_EOR[:, rows, first : first + part.rank] = b_EHR
        first += part.rank
    return a_ERD.flatten(0, 1), b_EOR.flatten(0, 1)


def _stacked(own: Matrices, experts: int, read: Read) -> Tensor:
    """Return matrices by expert; those that the file leaves out are zeros."""
    if ALL in own:
        whole = read(own[ALL])
        return whole.expand(experts, *whole.shape[-2:])
    some = read(next(iter(own.values())))
    found = torch.zeros(experts, *some.shape, dtype=some.dtype)
    for expert, entry in own.items():
        found[expert] = read(entry)
    return found
