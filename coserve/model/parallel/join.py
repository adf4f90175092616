"""Connects a process to the other tensor-parallel ranks, by torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from coserve.model.parallel.mesh import GroupMesh, Mesh
from coserve.model.parallel.symmetric import set_up_collectives, symmetric_mesh


def join(rank: int, size: int, *, address: str, device: torch.device, timeout: float) -> Mesh:
    """Join this process to the ranks at `address` and wait for them; a process joins once.

    `address`: `file://PATH` of a file that does not exist yet, or `tcp://127.0.0.1:PORT`, where rank 0 listens.
    `timeout`: seconds to wait for the other ranks, when joining, and later in each collective on CPU. On CUDA the
    device must be set before.

    Raises:
        RuntimeError (torch.distributed's DistError): the other ranks did not come in time.
    """
    if size == 1:
        return Mesh()
    cuda = device.type == "cuda"
    if cuda:
        set_up_collectives()
        device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=address,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=device if cuda else None,
    )
    group = dist.group.WORLD
    assert group is not None
    return symmetric_mesh(group, device) if cuda else GroupMesh(group)
