"""A mesh whose small all-reduces are one kernel: each rank reads the others' buffers over NVLink and adds them up.

On H200s an all-reduce of one row of 8192 takes 6.5 us so, and 14 us by NCCL; above a megabyte NCCL is as fast (TP 2 and 4; scratch).
Every rank adds in the order of ranks, so all have the same bits. NVLink multicast is never used.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from coserve.parallel.mesh import ONE_SHOT_ALIGNMENT, ONE_SHOT_BYTES, GroupMesh, fits_one_shot

_DTYPES = (torch.bfloat16, torch.float32)


def forbid_multicast() -> None:
    """For this process and those that it starts. Call it before the first CUDA collective."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["NVSHMEM_DISABLE_NVLS"] = "1"


class SymmetricMesh(GroupMesh):
    """NCCL, and a one-shot all-reduce for small messages. CUDA graphs can capture both."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks call this at once. Raises `RuntimeError` where their GPUs cannot read each other's memory."""
        super().__init__(group)
        import torch.distributed._symmetric_memory as symmetric

        most = ONE_SHOT_BYTES.get(self.size, 0)
        self._buffers: dict[torch.dtype, Tensor] = {}
        for dtype in _DTYPES if most else ():
            buffer = symmetric.empty(most // dtype.itemsize, dtype=dtype, device=device)
            handle = symmetric.rendezvous(buffer, group)
            if handle.multicast_ptr:
                raise RuntimeError("expected symmetric memory without multicast")
            self._buffers[dtype] = buffer

    def one_shot(self, size: int) -> bool:
        return fits_one_shot(size, self.size)

    def all_reduce(self, x: Tensor) -> Tensor:
        buffer = self._buffers.get(x.dtype)
        if buffer is None or not self.one_shot(x.nbytes):
            return super().all_reduce(x)
        self.traffic.add("all_reduce", x)
        x = x.contiguous()
        if x.data_ptr() % ONE_SHOT_ALIGNMENT:
            x = x.clone()
        # The kernel copies x into the buffer, waits for the others' copies, and waits for their reads before it ends.
        own = buffer[: x.numel()]
        found: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(own, x.view(-1), "sum", self.group.group_name)
        return found.view(x.shape)


def symmetric_mesh(group: dist.ProcessGroup, device: torch.device) -> GroupMesh:
    """A `SymmetricMesh` where it works on every rank, else NCCL alone. All ranks call this at once."""
    mesh: GroupMesh = GroupMesh(group)
    works = 0
    try:
        own = SymmetricMesh(group, device)
        got = own.all_reduce(torch.full((64,), 2.0 + own.rank, device=device))
        works = int(bool((got == sum(2.0 + rank for rank in range(own.size))).all()))
        own.traffic.clear()
    except (RuntimeError, AttributeError, ImportError):
        works = 0
    everywhere = torch.tensor([works], device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
    return own if int(everywhere) else mesh
