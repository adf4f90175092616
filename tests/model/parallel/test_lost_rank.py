"""A rank that is gone while the base loads: the others say so, and do not blame the base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from coserve.core.errors import UnsupportedBase
from coserve.model.load import load_base
from coserve.model.parallel.mesh import Mesh
from tests.support import sharded
from tests.support.ranks import Ranks


def _load(mesh: Mesh, folder: str) -> str:
    """How loading ends on rank 0, when the other has left."""
    if mesh.rank:
        dist.destroy_process_group()
        return ""
    try:
        load_base(folder, device="cpu", dtype="auto", mesh=mesh)
    except UnsupportedBase:
        return "refused"
    except RuntimeError:
        return "lost"
    return "loaded"


@pytest.mark.slow
def test_a_base_is_not_refused_because_another_rank_is_gone(tmp_path: Path) -> None:
    folder = sharded.save_base(tmp_path)
    with Ranks(2, timeout=6) as ranks:
        assert ranks.run(_load, folder) == ["lost", ""]
