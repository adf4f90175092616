"""A mesh whose all-reduces are one kernel up to some megabytes (`parallel.push`); NCCL does the rest. NVLink multicast is never used."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
from torch import Tensor

from coserve.parallel.mesh import GroupMesh, fits_one_shot
from coserve.parallel.push import ALIGNMENT, PushSum

log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PUSHED_BYTES = {2: 32 << 20, 4: 1 << 20, 8: 1 << 18}
"""Largest message of such an all-reduce, by ranks; N ranks have 2 · N times as much memory for it. On two GPUs it is faster than NCCL at all of these
sizes (`bdlora.json`, all_reduce_us); of four and eight ranks, to which each sends its numbers N - 1 times, not measured."""
BLOCK_BYTES = 4096


def forbid_multicast() -> None:
    """For this process and those that it starts. Call it before the first CUDA collective."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["NVSHMEM_DISABLE_NVLS"] = "1"


class SymmetricMesh(GroupMesh):
    """NCCL, and direct writes for messages of some megabytes. CUDA graphs can capture both."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks call this at once. Raises `RuntimeError` where their GPUs cannot read each other's memory."""
        super().__init__(group)
        most = PUSHED_BYTES.get(self.size, 0)
        self._push = PushSum(group, device, most=most, block_bytes=BLOCK_BYTES) if most else None

    def one_shot(self, size: int) -> bool:
        return fits_one_shot(size, self.size)

    def all_reduce(self, x: Tensor) -> Tensor:
        push = self._push
        if push is None or x.dtype not in _DTYPES or not 0 < x.nbytes <= push.most:
            return super().all_reduce(x)
        self.traffic.add("all_reduce", x)
        x = x.contiguous()
        return push(x.clone() if x.data_ptr() % ALIGNMENT else x)


def symmetric_mesh(group: dist.ProcessGroup, device: torch.device) -> GroupMesh:
    """A `SymmetricMesh` where it works on every rank, else NCCL alone. All ranks call this at once."""
    mesh, works, why = GroupMesh(group), 0, "another rank could not"
    try:
        own = SymmetricMesh(group, device)
        right = sum(2.0 + rank for rank in range(own.size))
        works = 1
        for dtype in _DTYPES:  # which also compiles the kernel
            got = own.all_reduce(torch.full((64,), 2.0 + own.rank, dtype=dtype, device=device))
            works &= int(bool((got == right).all()))
        own.traffic.clear()
        why = why if works else "the sums were wrong"
    except Exception as error:  # noqa: BLE001 - whatever it is, NCCL does the same
        works, why = 0, (str(error) or type(error).__name__).splitlines()[0]
    everywhere = torch.tensor([works], device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
    if int(everywhere):
        return own
    mesh.note = f"ranks: all sums go by NCCL, which is slower for small ones, as the GPUs do not write to each other's memory: {why}"
    log.warning("%s", mesh.note)
    return mesh
