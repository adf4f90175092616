"""Which GPU a rank takes, of those that are visible."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from coserve.config import Config
from coserve.core.errors import ConfigError
from coserve.core.ranks import RankPlace, board_bytes
from coserve.engine.ranks import serve
from coserve.engine.ranks.progress import OwnRank
from coserve.model.parallel.mesh import LoneRank, Mesh


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnRank]:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, os.environ.get(name, "lo"))
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile() as board:
        board.truncate(board_bytes(2))
        yield OwnRank(
            RankPlace(rank=1, size=2, rendezvous="", board=board.fileno(), monitor=theirs.detach(), commands=())
        )


def test_a_rank_takes_the_visible_gpu_of_its_number(rank: OwnRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts visible ones, whatever CUDA_VISIBLE_DEVICES names. No thread but the first has it as its current
    one."""
    used, seen = list[Any](), dict[str, Any]()

    def join(number: int, size: int, **how: Any) -> Mesh:
        seen.update(how)
        return LoneRank(number, size)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(serve, "join", join)
    monkeypatch.setattr(serve, "load_base", lambda model, *, device, mesh, **_: (device, mesh.rank))
    config = Config(model="bundled", tp=2)
    assert serve.load_ranked_base(config, rank) == ("cuda:1", 1)
    assert (used, seen["device"]) == ([1], torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="expected a GPU for each of 2 ranks, found 1"):
        serve.load_ranked_base(config, rank)
