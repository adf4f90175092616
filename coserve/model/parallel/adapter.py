"""Partitions one adapter among tensor-parallel ranks: sharding, summing partial gradients, gathering the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from coserve.kernels.lora.types import LoraPair
from coserve.model.parallel.lora import PairPartition, partition_pair
from coserve.model.parallel.partition import Features, MatrixPartition
from coserve.model.parallel.sharding import Sharding

Matrices = Mapping[str, tuple[Tensor, ...]]
"""For each site, tensors shaped as a pair's a_RD and b_OR, and as magnitude_O with DoRA: weights, gradients, or moments
of an optimizer."""


@dataclass(frozen=True, eq=False)
class AdapterPartition:
    """How one adapter is partitioned. Every rank makes the same one, and calls its collectives at the same time."""

    sharding: Sharding
    pairs: Mapping[str, PairPartition]
    """Partition of each site's pair."""
    magnitudes: Mapping[str, MatrixPartition] = field(default_factory=dict)
    """Partition of each site's DoRA magnitude, as a matrix of one column."""

    @classmethod
    def of(cls, sharding: Sharding, whole: Mapping[str, LoraPair]) -> Self:
        """Partition an adapter. Only the shapes of `whole` matter."""
        column = Features.whole(1, sharding.mesh.size)
        magnitudes = {
            name: MatrixPartition(sharding.sites[name].outputs, column)
            for name, pair in whole.items()
            if pair.magnitude_O is not None
        }
        return cls(sharding, {name: _partition(sharding, name, pair) for name, pair in whole.items()}, magnitudes)

    def matrices(self, name: str) -> tuple[MatrixPartition, ...]:
        """Return the partitions of a site's tensors in `Matrices`."""
        pair = self.pairs[name]
        return (pair.a, pair.b, self.magnitudes[name]) if name in self.magnitudes else (pair.a, pair.b)

    def keeps_blocks(self, whole: Mapping[str, LoraPair]) -> bool:
        """Whether no block-diagonal pair is partitioned as a dense one, so that gathered pairs keep their blocks."""
        return all(
            (pair.a_blocks, pair.b_blocks) == (self.pairs[name].whole_a_blocks, self.pairs[name].whole_b_blocks)
            for name, pair in whole.items()
        )

    def shard(self, whole: Mapping[str, LoraPair]) -> dict[str, LoraPair]:
        """Return this rank's shards of the whole pairs; differentiable."""
        return {name: self._shard(name, pair) for name, pair in whole.items()}

    def _shard(self, name: str, whole: LoraPair) -> LoraPair:
        rank, magnitude_O = self.sharding.mesh.rank, whole.magnitude_O
        own = self.pairs[name].shard(whole, rank)
        if magnitude_O is None:
            return own
        return replace(own, magnitude_O=self.magnitudes[name].rows.shard(magnitude_O, rank).contiguous())

    @torch.no_grad()
    def gather(self, parts: Matrices) -> Tensor:
        """Gather the matrices of some sites from all ranks' shards, by one collective.

        Returns them flat, for `put`: those that every rank holds whole, then each rank's shards of the others.
        """
        whole, sharded = list[Tensor](), list[Tensor]()
        for name, pair in parts.items():
            for own, tensor in zip(self.matrices(name), pair, strict=True):
                (whole if own.is_whole else sharded).append(tensor.reshape(-1))
        if sharded:
            whole.append(self.sharding.mesh.all_gather_parts(torch.cat(sharded)).view(-1))
        return torch.cat(whole)

    @torch.no_grad()
    def put(self, gathered: Tensor, wholes: Matrices) -> None:
        """Write what `gather` has returned for these sites, on any device, into the whole matrices."""
        sharded, at = list[tuple[MatrixPartition, Tensor]](), 0
        for name, pair in wholes.items():
            for own, whole in zip(self.matrices(name), pair, strict=True):
                if own.is_whole:
                    whole.view(-1).copy_(gathered[at : at + whole.numel()])
                    at += whole.numel()
                else:
                    sharded.append((own, whole.view(own.rows.size, own.columns.size)))
        for rank in range(self.sharding.mesh.size):
            for own, whole in sharded:
                own.put(gathered[at : at + own.local].view(own.shape), whole, rank)
                at += own.local

    def gathered(self, name: str) -> int:
        """Number of elements that `gather` returns for a site."""
        return sum(own.local * (1 if own.is_whole else self.sharding.mesh.size) for own in self.matrices(name))

    @torch.no_grad()
    def sum_gradients(self, parts: Matrices) -> None:
        """Complete gradients in place: sum those of elements that several ranks hold, over these ranks.

        One collective, or none: `bd` and `slora` have such elements only where ranks share a key/value head or a
        group of Mamba-2. Call it once before an optimizer step.
        """
        shared = list(self._shared(parts))
        if not shared:
            return
        mesh, wholes = self.sharding.mesh, []
        for own, tensor in shared:
            whole = tensor
            if not own.is_whole:
                whole = tensor.new_zeros(own.rows.size, own.columns.size)
                own.put(tensor.view(own.shape), whole, mesh.rank)
            wholes.append(whole.view(-1))
        summed = torch.split(mesh.all_reduce(torch.cat(wholes)), [len(whole) for whole in wholes])
        torch._foreach_copy_(
            [tensor for _, tensor in shared],
            [
                whole.view(tensor.shape)
                if own.is_whole
                else own.shard(whole.view(own.rows.size, own.columns.size), mesh.rank).view_as(tensor)
                for (own, tensor), whole in zip(shared, summed, strict=True)
            ],
        )

    @torch.no_grad()
    def norm(self, parts: Matrices) -> Tensor:
        """Return the Euclidean norm (fp64, scalar) of the whole matrices, counting each element once.

        The norm of each single matrix is computed in its dtype.
        """
        by_holders: dict[int, list[Tensor]] = {}
        for name in self.pairs:
            for own, tensor in zip(self.matrices(name), parts[name], strict=True):
                once = own.first(tensor.view(own.shape), self.sharding.mesh.rank) if own.overlaps else tensor
                by_holders.setdefault(own.holders, []).append(once)
        squares = [
            torch.stack(torch._foreach_norm(tensors)).double().square().sum() / holders
            for holders, tensors in by_holders.items()
        ]
        return self.sharding.mesh.all_reduce(torch.stack(squares).sum()).sqrt()

    def _shared(self, parts: Matrices) -> Iterator[tuple[MatrixPartition, Tensor]]:
        for name in self.pairs:
            for own, tensor in zip(self.matrices(name), parts[name], strict=True):
                if own.holders > 1 or own.overlaps:
                    yield own, tensor


def _partition(sharding: Sharding, name: str, pair: LoraPair) -> PairPartition:
    experts = sharding.experts.get(name)
    return partition_pair(sharding.sites[name], pair, sharding.strategy) if experts is None else experts.pair(pair)
