"""How a mixture's fused parameters are partitioned among the ranks, and the sum of a module's outputs.

Tensor parallelism: every rank has some features of every expert, output features of gate and up and input features of
down. Expert parallelism: every rank has some experts whole. Either way the ranks have the same hidden states, each
computes its part of the output for all tokens, and one all-reduce adds the parts up.

Letters: T tokens, K experts chosen by each, E experts, O outputs, D inputs, R LoRA rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from coserve.core.errors import UnsupportedBase
from coserve.core.types import SiteSpec
from coserve.kernels.lora.types import LoraPair
from coserve.model.parallel.functions import sum_over_ranks
from coserve.model.parallel.lora import PairPartition, Strategy
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.partition import Features, Lazy, MatrixPartition

EXPERTS = "coserve_experts_shard"
"""Attribute of a sharded module of experts that holds its `ExpertShard`."""

FIRST = "coserve_first_expert"
"""Attribute of a module that has only some of the experts: index of the first one. Traced code reads it."""


@dataclass(frozen=True)
class ExpertPartition:
    """Partition of one fused parameter (E, O, D)."""

    experts: Features
    outputs: Features
    inputs: Features

    @classmethod
    def of(cls, spec: SiteSpec, leaf: str, ranks: int, *, by_expert: bool) -> ExpertPartition:
        """Partition a parameter by experts, or by features. Raises `UnsupportedBase` for sizes that the ranks do not
        divide."""
        whole = cls(*(Features.whole(size, ranks) for size in (spec.experts, spec.out_features, spec.in_features)))
        if by_expert:
            _check(spec.experts, ranks, "experts")
            return cls(Features.even(spec.experts, ranks), whole.outputs, whole.inputs)
        if leaf == "down_proj":
            _check(spec.in_features, ranks, "features of an expert")
            return cls(whole.experts, whole.outputs, Features.even(spec.in_features, ranks))
        parts = 2 if spec.halves else 1
        _check(spec.out_features // parts, ranks, "features of an expert")
        if spec.halves == "concatenated":
            half = Features.even(spec.out_features // 2, ranks)
            return cls(whole.experts, Features.joined([half, half]), whole.inputs)
        return cls(whole.experts, Features.even(spec.out_features, ranks), whole.inputs)  # interleaved: whole pairs

    def weight(self, whole: Lazy, rank: int, *, transposed: bool) -> Tensor:
        """Return the rank's shard of the parameter. `transposed`: it is (E, D, O)."""
        ((first, last),) = self.experts.ranks[rank]
        rows, columns = (self.inputs, self.outputs) if transposed else (self.outputs, self.inputs)
        parts = [
            torch.cat([whole[first:last, a:b, c:d] for c, d in columns.ranks[rank]], 2) for a, b in rows.ranks[rank]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def bias(self, whole: Lazy, rank: int) -> Tensor:
        """Return the rank's shard of a bias (E, O). If outputs are summed over the ranks, it is zero on all ranks but
        the first."""
        ((first, last),) = self.experts.ranks[rank]
        found = torch.cat([whole[first:last, a:b] for a, b in self.outputs.ranks[rank]], 1)
        return torch.zeros_like(found) if self.inputs.local < self.inputs.size and rank else found

    def whole(self, spec: SiteSpec) -> SiteSpec:
        """Return the whole parameter's description from that of the rank's shard."""
        found = replace(spec, experts=self.experts.size, out_features=self.outputs.size, in_features=self.inputs.size)
        return replace(found, by_expert=self.experts.local < self.experts.size)

    def pair(self, pair: LoraPair) -> PairPartition:
        """Return the partition of an adapter's stacked pairs, a_RD (E R, D) and b_OR (E O, R): a rank has those of its
        experts or, in tensor parallelism, its features of all pairs. A of gate and up and B of down are then on every
        rank, as under `nfs`."""
        ranks = len(self.experts.ranks)
        rank = Features.whole(pair.rank, ranks)
        return PairPartition(
            Strategy.NFS,
            a=MatrixPartition(self._stacked(rank), self.inputs),
            b=MatrixPartition(self._stacked(self.outputs), rank),
            experts=self.experts.local,
        )

    def _stacked(self, rows: Features) -> Features:
        """Return the partition of a matrix in which the experts' rows are stacked; `rows`: partition of one expert's
        rows."""
        ranges = tuple(
            tuple((expert * rows.size + a, expert * rows.size + b) for expert in range(first, last) for a, b in own)
            for ((first, last),), own in zip(self.experts.ranks, rows.ranks, strict=True)
        )
        return Features(self.experts.size * rows.size, tuple(map(_merged, ranges)))


def _merged(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Merge adjacent ranges."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def _check(size: int, ranks: int, what: str) -> None:
    if size % ranks:
        raise UnsupportedBase(f"expected a number of {what} that {ranks} GPUs divide, got {size}")


@dataclass(frozen=True, eq=False)
class ExpertShard:
    """This rank's part of a module of experts."""

    partitions: Mapping[str, ExpertPartition]
    """Partition of each parameter, by its name in the module."""
    mesh: Mesh

    def sum(self, y_TD: Tensor) -> Tensor:
        """Return the sum of all ranks' outputs, in new memory; differentiable."""
        return sum_over_ranks(y_TD.contiguous(), self.mesh)


def local_experts(chosen_TK: Tensor, first: int, experts: int) -> Tensor:
    """Return the chosen experts as indices on this rank; experts of other ranks become `experts`, one past the last."""
    own_TK = chosen_TK - first
    return torch.where((own_TK >= 0) & (own_TK < experts), own_TK, experts)


def expert_shard(module: nn.Module) -> ExpertShard | None:
    """Return the shard of a module of experts; None if it is whole."""
    return cast("ExpertShard | None", getattr(module, EXPERTS, None))
