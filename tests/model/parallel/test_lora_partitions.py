"""LoRA matrices partitioned among ranks: the ranks' terms give those of the whole pair, without any process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coserve.kernels.lora.types import LoraPair
from coserve.model.parallel.lora import FullyShardedPair, PairPartition, Strategy, partition_pair
from coserve.model.parallel.partition import Features, Parallel, SitePartition

T, D, O, R = 5, 24, 48, 24
SCALING = 0.5


def _pair(a_blocks: int = 1, b_blocks: int = 1) -> LoraPair:
    a, b = torch.randn(R, D // a_blocks), torch.randn(O, R // b_blocks)
    return LoraPair(a, b, SCALING, a_blocks=a_blocks, b_blocks=b_blocks)


def _delta(pair: LoraPair, x_TD: Tensor) -> Tensor:
    dense = pair.dense()
    return (x_TD @ dense.a_RD.T) @ dense.b_OR.T * pair.scaling


def _column(ranks: int, heads: int = 8) -> SitePartition:
    return SitePartition(Parallel.COLUMN, Features.whole(D, ranks), Features.heads(heads, O // heads, ranks))


def _fused(ranks: int) -> SitePartition:
    parts = [Features.heads(4, O // 16, ranks), Features.heads(8, O // 16, ranks), Features.heads(4, O // 16, ranks)]
    return SitePartition(Parallel.COLUMN, Features.whole(D, ranks), Features.joined(parts))


def _row(ranks: int) -> SitePartition:
    return SitePartition(Parallel.ROW, Features.even(D, ranks), Features.whole(O, ranks))


def _outputs(site: SitePartition, partition: PairPartition, pair: LoraPair, x_TD: Tensor) -> list[Tensor]:
    """What each rank adds to its output: the paper's operations, spelled out."""
    ranks = range(len(site.inputs.ranks))
    parts = [partition.shard(pair, rank) for rank in ranks]
    inputs = [torch.cat([x_TD[:, a:b] for a, b in site.inputs.ranks[rank]], 1) for rank in ranks]
    if partition.strategy is not Strategy.SLORA:
        return [_delta(part, own) for part, own in zip(parts, inputs, strict=True)]
    assert all(isinstance(part, FullyShardedPair) for part in parts)
    shrunk = [own @ part.a_RD.T for part, own in zip(parts, inputs, strict=True)]
    if not site.sums:
        h_TR = torch.cat(shrunk, 1)
        return [h_TR @ part.b_OR.T * SCALING for part in parts]
    h_TR, width = torch.stack(shrunk).sum(0), O // len(parts)
    found = []
    for rank, part in enumerate(parts):
        y = torch.zeros(T, O)
        y[:, rank * width : (rank + 1) * width] = h_TR @ part.b_OR.T * SCALING
        found.append(y)
    return found


def _check(site: SitePartition, pair: LoraPair, strategy: Strategy) -> PairPartition:
    partition, x_TD = partition_pair(site, pair, strategy), torch.randn(T, D)
    expected, outputs = _delta(pair, x_TD), _outputs(site, partition, pair, x_TD)
    if site.sums:
        torch.testing.assert_close(torch.stack(outputs).sum(0), expected, rtol=1e-4, atol=1e-4)
    for rank, output in enumerate(outputs):
        if not site.sums:
            own = torch.cat([expected[:, a:b] for a, b in site.outputs.ranks[rank]], 1)
            torch.testing.assert_close(output, own, rtol=1e-4, atol=1e-4)
    whole = pair if partition.whole_a_blocks * partition.whole_b_blocks > 1 else pair.dense()
    a, b = torch.full_like(whole.a_RD, torch.nan), torch.full_like(whole.b_OR, torch.nan)
    for rank in range(len(site.inputs.ranks)):
        part = partition.shard(pair, rank)
        assert (part.a_RD.shape, part.b_OR.shape) == (partition.a.shape, partition.b.shape)
        partition.a.put(part.a_RD, a, rank)
        partition.b.put(part.b_OR, b, rank)
    assert torch.equal(a, whole.a_RD)
    assert torch.equal(b, whole.b_OR)
    return partition


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("strategy", [Strategy.NFS, Strategy.SLORA])
def test_dense_pairs(ranks: int, strategy: Strategy) -> None:
    for site in (_column(ranks), _column(ranks, heads=2), _fused(ranks), _row(ranks)):
        assert _check(site, _pair(), strategy).strategy is strategy


@pytest.mark.parametrize(
    ("ranks", "blocks"), [(1, 2), (2, 2), (2, 4), (4, 4), (1, 12), (4, 2), (2, 12), (8, 8), (8, 2), (2, 8)]
)
def test_block_diagonal_pairs_of_whole_blocks_or_parts_of_one(ranks: int, blocks: int) -> None:
    column, row = _pair(b_blocks=blocks), _pair(a_blocks=blocks)
    partition = _check(_column(ranks), column, Strategy.SLORA)
    assert (partition.strategy, partition.b_blocks) == (Strategy.BD, max(1, blocks // ranks))
    partition = _check(_row(ranks), row, Strategy.SLORA)
    assert (partition.strategy, partition.a_blocks) == (Strategy.BD, max(1, blocks // ranks))
    stored = sum(partition.shard(row, rank).a_RD.numel() for rank in range(ranks))
    assert stored == row.a_RD.numel(), "no zeros, and nothing twice"


def test_blocks_of_a_replicated_head_lie_on_every_rank_that_has_it() -> None:
    """Two key/value heads, four ranks, four blocks: a head's two blocks are on both of its ranks."""
    partition = _check(_column(4, heads=2), _pair(b_blocks=4), Strategy.NFS)
    assert (partition.strategy, partition.b_blocks, partition.b.holders, partition.a.holders) == (Strategy.BD, 2, 2, 2)


def test_blocks_that_fit_no_rank_are_cut_as_dense() -> None:
    assert _check(_column(2), _pair(b_blocks=3), Strategy.NFS).strategy is Strategy.NFS
    assert _check(_row(2), _pair(a_blocks=3), Strategy.SLORA).strategy is Strategy.SLORA
    assert _check(_row(2), _pair(b_blocks=2), Strategy.NFS).strategy is Strategy.NFS  # of the other kind of site
    assert _check(_fused(2), _pair(b_blocks=2), Strategy.NFS).strategy is Strategy.NFS


def test_ranks_that_cannot_be_divided_are_not_fully_sharded() -> None:
    pair = LoraPair(torch.randn(3, D), torch.randn(O, 3), SCALING)
    assert partition_pair(_column(2), pair, Strategy.SLORA).strategy is Strategy.NFS
    outputs = O + 2  # four ranks could not have equal parts of them to reduce
    site = SitePartition(Parallel.ROW, Features.even(D, 4), Features.whole(outputs, 4))
    pair = LoraPair(torch.randn(R, D), torch.randn(outputs, R), SCALING)
    assert partition_pair(site, pair, Strategy.SLORA).strategy is Strategy.NFS


def test_holders_say_whose_gradients_are_parts() -> None:
    nfs = partition_pair(_column(4), _pair(), Strategy.NFS), partition_pair(_row(4), _pair(), Strategy.NFS)
    assert [(partition.a.holders, partition.b.holders) for partition in nfs] == [(4, 1), (1, 4)]
    slora = partition_pair(_column(4), _pair(), Strategy.SLORA), partition_pair(_row(4), _pair(), Strategy.SLORA)
    assert [(partition.a.holders, partition.b.holders) for partition in slora] == [(1, 1), (1, 1)]
    bd = (
        partition_pair(_column(4), _pair(b_blocks=4), Strategy.NFS),
        partition_pair(_row(4), _pair(a_blocks=4), Strategy.NFS),
    )
    assert [(partition.a.holders, partition.b.holders) for partition in bd] == [(1, 1), (1, 1)]
