"""Collectives of a CUDA graph on ranks that run a slice: all of them begin when it is launched, or none does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from coserve.core.errors import EngineFault
from coserve.model.agreement import FailedTogether, on_all_ranks
from coserve.model.parallel.lockstep import PeerFailed
from coserve.model.parallel.mesh import GroupMesh, Mesh
from tests.support.ranks import Ranks

CPU = torch.device("cpu")


def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.001)


def _other_has_failed(mesh: Mesh) -> bool:
    try:
        mesh.guard.check()
    except PeerFailed:
        return True
    return False


def _launched(mesh: Mesh, fails_first: bool, launched: Path) -> tuple[dict[str, int], bool]:
    """Rank 1 fails before or after rank 0 launches a graph of two collectives, played here by the collectives
    themselves; then there is a file `launched`. What was counted, and whether ranks are together after it."""
    assert isinstance(mesh, GroupMesh)
    own, parts = torch.ones(5), torch.ones(2, 7)

    def work() -> None:
        def graph() -> None:
            launched.touch()
            dist.all_reduce(own, group=mesh.group)
            dist.all_gather_into_tensor(parts.view(-1), torch.ones(7), group=mesh.group)

        with mesh.traffic.held() as launch:
            mesh.traffic.add("all_reduce", own)
            mesh.traffic.add("all_gather", parts[0])
        assert not mesh.traffic.calls, "nothing has begun"
        if mesh.rank == 1:
            _until(lambda: fails_first or launched.exists())
            raise ValueError("no graph")
        _until(lambda: not fails_first or _other_has_failed(mesh))
        launch(graph)

    with pytest.raises(FailedTogether):
        on_all_ranks(mesh, CPU, work)
    counted = dict(mesh.traffic.calls)
    return counted, mesh.all_reduce(torch.ones(3)).tolist() == [float(mesh.size)] * 3


@pytest.mark.parametrize("fails_first", [True, False])
def test_a_rank_that_fails_takes_part_in_all_that_another_has_launched(
    two: Ranks, fails_first: bool, tmp_path: Path
) -> None:
    own, other = two.run(_launched, fails_first, tmp_path / "launched")
    assert own[1] and other[1]
    # The reports of ranks, and what rank 0 had launched, which rank 1 then runs with zeros.
    launched = {"all_gather": 1} if fails_first else {"all_reduce": 1, "all_gather": 2}
    assert own[0] == other[0] == launched


def _counted(mesh: Mesh) -> list[dict[str, int]]:
    found = []
    with mesh.traffic.held() as launch:
        mesh.traffic.add("all_reduce", torch.ones(4, dtype=torch.bfloat16))
    for _ in range(2):
        found.append(dict(mesh.traffic.calls) | {"bytes": mesh.traffic.bytes["all_reduce"]})
        launch(lambda: None)
    mesh.traffic.add("all_reduce", torch.ones(1))
    return [*found, dict(mesh.traffic.calls) | {"bytes": mesh.traffic.bytes["all_reduce"]}]


def test_each_launch_counts() -> None:
    assert _counted(Mesh()) == [{"bytes": 0}, {"all_reduce": 1, "bytes": 8}, {"all_reduce": 3, "bytes": 20}]


def test_a_graph_with_collectives_that_cannot_be_launched_ends_the_engine() -> None:
    """Without any, its error is the job's."""

    def graph() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    traffic = Mesh().traffic
    for collectives, error in ((0, torch.OutOfMemoryError), (1, EngineFault)):
        with traffic.held() as launch:
            for _ in range(collectives):
                traffic.add("all_reduce", torch.ones(4))
        with pytest.raises(error):
            launch(graph)
