"""Selection of the weights that GEMM kernels are measured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coserve.kernels.lora.types import StackedWeights
from coserve.model.gemm_choice import MEASURED

L2_BYTES = 200 << 20
"""Larger than any GPU's L2 cache. GEMMs are measured over this many bytes of weights, because a step reads all weights
from HBM."""


def gemm_cases(stacked: Sequence[StackedWeights]) -> list[StackedWeights]:
    """Return, for each shape, enough weights, including copies, to exceed the L2 cache."""
    return [one for kind in _by_kind(stacked).values() for one in _exceeding_l2(kind)]


def _by_kind(stacked: Sequence[StackedWeights]) -> dict[tuple[int, ...], list[StackedWeights]]:
    kinds: dict[tuple[int, ...], list[StackedWeights]] = {}
    for one in stacked:
        kinds.setdefault((one.in_features, *one.sizes), []).append(one)
    return kinds


def _exceeding_l2(kind: Sequence[StackedWeights]) -> list[StackedWeights]:
    """The weights of one shape, with copies so that they exceed the L2 cache together (at most `MEASURED`)."""
    size = kind[0].weight.numel() * kind[0].weight.element_size()
    copies = min(MEASURED, max(len(kind), -(-L2_BYTES // size))) - len(kind)
    return [*kind, *(replace(kind[0], weight=kind[0].weight.clone()) for _ in range(copies))]
