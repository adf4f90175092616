"""Partitions LoRA matrices among tensor-parallel ranks: three strategies, for column- and row-parallel sites.

Letters: T tokens, D inputs and O outputs of the whole site, R LoRA rank, N ranks of the mesh, i this rank.

- `bd`, BD-LoRA (section 3 and appendix B of its paper). Column-parallel: B is block-diagonal. Rank i takes
  the blocks of its outputs, and the rows of A that feed them. Row-parallel: A is block-diagonal. Rank i takes the
  blocks of its inputs, and the columns of B that they feed; the terms are added before the base's all-reduce. Nothing
  more is sent.
- `nfs`, not fully sharded, vLLM's default (same paper, section 5). Column-parallel: all of A, and the rows of B for the
  rank's outputs. Row-parallel: the columns of A for the rank's inputs, and all of B; the terms are added before the
  base's all-reduce. Nothing more is sent; one of A and B is held, and multiplied by, N times. It equals `bd` with one
  block.
- `slora`, fully sharded (Sheng et al., S-LoRA, MLSys '24, section 6). Column-parallel: R/N rows of A, and the rows of B
  for the rank's outputs; x Aᵀ is gathered from all ranks. Row-parallel: the columns of A for the rank's inputs, and O/N
  rows of B; x Aᵀ is summed over the ranks, and rank i adds its O/N outputs before the base's all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from torch import Tensor

from coserve.kernels.lora.types import LoraPair
from coserve.model.parallel.partition import Features, MatrixPartition, Range, SitePartition


class Strategy(StrEnum):
    BD = "bd"
    NFS = "nfs"
    SLORA = "slora"


@dataclass(frozen=True)
class FullyShardedPair(LoraPair):
    """One rank's shard of a pair under `slora`.

    Column-parallel: a (R/N, D), b (O/N, R). Row-parallel: a (R, D/N), b (O/N, R).
    """

    shards: int = 1
    """Number of ranks among which the rows of a are partitioned."""

    @property
    def rank(self) -> int:
        """LoRA rank R of the whole pair."""
        return self.a_RD.shape[0] * self.shards


@dataclass(frozen=True)
class PairPartition:
    """Partition of one adapter's pair at one site."""

    strategy: Strategy
    a: MatrixPartition
    """Partition of the whole a_RD, packed if it is block-diagonal."""
    b: MatrixPartition
    """Partition of the whole b_OR, packed if it is block-diagonal."""
    a_blocks: int = 1
    """Blocks in one rank's shard of a_RD."""
    b_blocks: int = 1
    whole_a_blocks: int = 1
    """Blocks of the whole a_RD; 1 for a block-diagonal matrix that is partitioned as a dense one, because no rank can
    hold whole blocks."""
    whole_b_blocks: int = 1
    experts: int = 1
    """Experts whose pairs are stacked in one rank's shard."""

    def shard(self, whole: LoraPair, rank: int) -> LoraPair:
        """Return the rank's shard of a pair, without `main_grads`; differentiable."""
        if (whole.a_blocks, whole.b_blocks) != (self.whole_a_blocks, self.whole_b_blocks):
            whole = whole.dense()
        a, b = self.a.shard(whole.a_RD, rank).contiguous(), self.b.shard(whole.b_OR, rank).contiguous()
        return self.pair(a, b, whole.scaling)

    def pair(self, a: Tensor, b: Tensor, scaling: float) -> LoraPair:
        """Return the sharded pair with these matrices."""
        if self.strategy is Strategy.SLORA:
            return FullyShardedPair(a, b, scaling, shards=b.shape[1] // a.shape[0])
        return LoraPair(a, b, scaling, a_blocks=self.a_blocks, b_blocks=self.b_blocks, experts=self.experts)


def partition_pair(site: SitePartition, pair: LoraPair, strategy: Strategy) -> PairPartition:
    """Choose the partition of a whole pair.

    A block-diagonal pair uses `bd` if each rank's shard of the site is whole blocks, or lies within one block: the
    number of blocks must divide that of ranks, or the other way round. Otherwise it is partitioned as a dense one.
    `strategy`: `nfs` or `slora`, for dense pairs; those whose LoRA rank the mesh does not divide use `nfs`.
    """
    if pair.blocks > 1:
        blocks = pair.a_blocks if site.sums else pair.b_blocks
        found = _local(site, pair.rank, blocks) if blocks > 1 else None
        if found is not None:
            return found
    if strategy is Strategy.SLORA:
        ranks = len(site.inputs.ranks)
        if pair.rank % ranks == 0 and site.outputs.size % ranks == 0:
            return _fully_sharded(site, pair.rank, ranks)
    found = _local(site, pair.rank, 1)
    assert found is not None, "expected one block to hold every part"
    return replace(found, strategy=Strategy.NFS)


def _local(site: SitePartition, rank: int, blocks: int) -> PairPartition | None:
    """Return the `bd` partition, which with one block is `nfs`; None if shards are neither whole blocks nor within
    one."""
    partition, other = (site.inputs, site.outputs) if site.sums else (site.outputs, site.inputs)
    if (partition.size % blocks) or rank % blocks:
        return None
    size, part = partition.size // blocks, rank // blocks
    spans = [_span(ranges, size) for ranges in partition.ranks]
    if None in spans:
        return None
    held = [span for span in spans if span is not None]
    count = held[0][1] - held[0][0]
    mid = Features(rank, tuple(((first * part, last * part),) for first, last in held))
    ranks = len(partition.ranks)
    packed = Features.whole(part, ranks)
    if not site.sums:
        return PairPartition(
            Strategy.BD,
            a=MatrixPartition(mid, other),
            b=MatrixPartition(partition, packed),
            b_blocks=count,
            whole_b_blocks=blocks,
        )
    # Columns of the packed matrix are those of a block: all of them, or the range that lies in one block.
    own = partition.ranks if blocks == 1 else tuple(_within(ranges, size) for ranges in partition.ranks)
    return PairPartition(
        Strategy.BD,
        a=MatrixPartition(mid, Features(size, own)),
        b=MatrixPartition(other, mid),
        a_blocks=count,
        whole_a_blocks=blocks,
    )


def _span(ranges: tuple[Range, ...], size: int) -> Range | None:
    """Return the range of the blocks of `size` features that contain the ranges: one block, or several that one range
    covers exactly; else None."""
    first, last = min(start for start, _ in ranges) // size, -(-max(stop for _, stop in ranges) // size)
    if last - first == 1 or (len(ranges) == 1 and ranges[0] == (first * size, last * size)):
        return first, last
    return None


def _within(ranges: tuple[Range, ...], size: int) -> tuple[Range, ...]:
    """Map ranges within one block, or whole blocks, to columns of a block."""
    if any(stop - start >= size for start, stop in ranges):
        return ((0, size),)
    return tuple((start % size, start % size + stop - start) for start, stop in ranges)


def _fully_sharded(site: SitePartition, rank: int, ranks: int) -> PairPartition:
    whole, even = Features.whole(rank, ranks), Features.even(rank, ranks)
    if site.sums:
        outputs = Features.even(site.outputs.size, ranks)
        return PairPartition(Strategy.SLORA, a=MatrixPartition(whole, site.inputs), b=MatrixPartition(outputs, whole))
    return PairPartition(Strategy.SLORA, a=MatrixPartition(even, site.inputs), b=MatrixPartition(site.outputs, whole))
