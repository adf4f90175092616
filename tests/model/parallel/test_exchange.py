"""Collectives between a shrink and an expand: whatever the message's size, every rank gets all parts or the sum of all
terms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coserve.model.parallel.exchange import GatheredRanks, SummedTerms
from coserve.model.parallel.mesh import GroupMesh, LoneRank, Mesh
from tests.support.ranks import OneShotMesh, Ranks

SPLITS, SHAPE = 3, (2, 5, 8)
"""Sites, tokens, ranks of a part."""


def _part(rank: int) -> Tensor:
    return torch.randn(SPLITS, *SHAPE, generator=torch.Generator().manual_seed(rank))


def _exchanged(mesh: Mesh, one_shot: bool, longest: int) -> list[tuple[Tensor, dict[str, int]]]:
    """Parts, then a sum; their splits added up."""
    assert isinstance(mesh, GroupMesh)
    mesh = OneShotMesh(mesh.group) if one_shot else mesh
    found, own = list[tuple[Tensor, dict[str, int]]](), _part(mesh.rank)
    for how in (GatheredRanks(mesh, split_bytes=longest), SummedTerms(mesh, None, split_bytes=longest)):
        h = own[None].clone()
        if how.needs_all_parts(mesh.size * own[0].nbytes):
            h = torch.stack([own if rank == how.own else torch.zeros_like(own) for rank in range(mesh.size)])
        mesh.traffic.clear()
        got = how.run(h)
        found.append((got.sum(1), dict(mesh.traffic.calls)))
    return found


def test_parts_and_sums_of_all_ranks(two: Ranks) -> None:
    expected = torch.stack([_part(rank).sum(0) for rank in range(2)])
    for one_shot in (False, True):
        for longest in (0, 1 << 18):
            for gathered, summed in two.run(_exchanged, one_shot, longest):
                torch.testing.assert_close(gathered[0], expected)
                torch.testing.assert_close(summed[0], expected.sum(0)[None])
                assert gathered[1] == {"all_reduce" if one_shot else "all_gather": 1}
                assert summed[1] == {"all_reduce": 1}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_rank_alone_takes_the_path_of_small_messages(size: int) -> None:
    """So that it compiles the kernels of those that a `SymmetricMesh` serves."""
    how = GatheredRanks(LoneRank(1, size))
    assert how.needs_all_parts(1 << 10)
    assert not how.needs_all_parts(1 << 21)
    own = torch.ones(1, SPLITS, 2, 1 << 15, 16)
    assert how.run(own).shape == (size, 1, 2, 1 << 15, 16)
