"""The collectives of a mesh and their counts, and those between a shrink and an expand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coserve.model.parallel.exchange import GatheredRanks, SummedTerms
from coserve.model.parallel.join import join
from coserve.model.parallel.mesh import GroupMesh, LoneRank, Mesh
from coserve.model.parallel.symmetric import symmetric_mesh
from tests.support.ranks import OneShotMesh, Ranks, rank_of


@pytest.mark.slow
def test_ranks_know_their_places(two: Ranks) -> None:
    assert two.run(rank_of) == [(0, 2), (1, 2)]


def _collectives(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, int], dict[str, int]]:
    x = torch.arange(6.0).view(2, 3) + 10 * mesh.rank
    reduced = mesh.all_reduce(x.clone())
    side, below = mesh.all_gather(x), mesh.all_gather(x, 0)
    sent = mesh.broadcast(x.clone(), root=1)
    return reduced, side, below, sent, dict(mesh.traffic.calls), dict(mesh.traffic.bytes)


def test_collectives_give_every_rank_the_same(two: Ranks) -> None:
    x = torch.arange(6.0).view(2, 3)
    for reduced, side, below, sent, calls, sizes in two.run(_collectives):
        assert torch.equal(reduced, 2 * x + 10)
        assert torch.equal(side, torch.cat([x, x + 10], 1))
        assert torch.equal(below, torch.cat([x, x + 10], 0))
        assert torch.equal(sent, x + 10)
        assert calls == {"all_reduce": 1, "all_gather": 2, "broadcast": 1}
        assert sizes == {"all_reduce": 24, "all_gather": 48, "broadcast": 24}


def test_one_rank_sends_nothing() -> None:
    mesh, x = join(0, 1, address="", device=torch.device("cpu"), timeout=1), torch.ones(3)
    assert mesh.all_reduce(x) is mesh.all_gather(x) is mesh.broadcast(x) is x
    assert (mesh.rank, mesh.size, dict(mesh.traffic.calls)) == (0, 1, {})


def _without_shared_memory(mesh: Mesh) -> tuple[str, str, list[float]]:
    assert isinstance(mesh, GroupMesh)
    found = symmetric_mesh(mesh.group, torch.device("cpu"))
    return type(found).__name__, found.note, found.all_reduce(torch.ones(2)).tolist()


def test_ranks_whose_devices_share_no_memory_say_so(two: Ranks) -> None:
    for kind, note, total in two.run(_without_shared_memory):
        assert (kind, total) == ("GroupMesh", [2.0, 2.0])
        assert note.startswith("ranks: NCCL alone sums up")


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
