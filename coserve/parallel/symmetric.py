"""A mesh whose small all-reduces are one kernel (`parallel.push`), and those above it two rounds of direct reads over NVLink; NCCL does the rest.

Every rank adds in the order of ranks, or reads what one rank has added, so all have the same bits. NVLink multicast is never used.
"""

from __future__ import annotations

import itertools
import os

import torch
import torch.distributed as dist
from torch import Tensor

from coserve.parallel.mesh import ONE_SHOT_ALIGNMENT, ONE_SHOT_BYTES, GroupMesh, fits_one_shot
from coserve.parallel.push import PushSum, shared_bytes

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK_BYTES = 4096
TWO_SHOT_BYTES = {2: 8 << 20}
"""Largest message of a two-shot all-reduce, by ranks. Of four and eight ranks not measured."""


def forbid_multicast() -> None:
    """For this process and those that it starts. Call it before the first CUDA collective."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["NVSHMEM_DISABLE_NVLS"] = "1"


class SymmetricMesh(GroupMesh):
    """NCCL, and direct writes and reads for messages of some megabytes. CUDA graphs can capture both."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks call this at once. Raises `RuntimeError` where their GPUs cannot read each other's memory."""
        super().__init__(group)
        most = ONE_SHOT_BYTES.get(self.size, 0)
        self._push = PushSum(group, device, most=most, block_bytes=_BLOCK_BYTES) if most else None
        two_shot = TWO_SHOT_BYTES.get(self.size, 0)
        self._buffer = shared_bytes(two_shot, group, device)[0] if two_shot else torch.empty(0, dtype=torch.uint8)

    def one_shot(self, size: int) -> bool:
        return fits_one_shot(size, self.size)

    def all_reduce(self, x: Tensor) -> Tensor:
        push = self._push is not None and self.one_shot(x.nbytes)
        two_shot = x.nbytes <= self._buffer.numel() and x.nbytes % (ONE_SHOT_ALIGNMENT * self.size) == 0
        if x.dtype not in _DTYPES or not (push or two_shot):
            return super().all_reduce(x)
        self.traffic.add("all_reduce", x)
        x = x.contiguous()
        if x.data_ptr() % ONE_SHOT_ALIGNMENT:
            x = x.clone()
        if self._push is not None and push:
            return self._push(x)
        own, out = self._buffer[: x.nbytes].view(x.dtype), torch.empty_like(x)
        own.copy_(x.view(-1))
        # The kernel waits for the others' copies, and for their reads before it ends.
        torch.ops.symm_mem.two_shot_all_reduce_out(own, "sum", self.group.group_name, out.view(-1))
        return out


def symmetric_mesh(group: dist.ProcessGroup, device: torch.device) -> GroupMesh:
    """A `SymmetricMesh` where it works on every rank, else NCCL alone. All ranks call this at once."""
    mesh: GroupMesh = GroupMesh(group)
    works = 0
    try:
        own = SymmetricMesh(group, device)
        right = sum(2.0 + rank for rank in range(own.size))
        works = 1
        for dtype, numbers in itertools.product(_DTYPES, (64, 1 << 20)):
            got = own.all_reduce(torch.full((numbers,), 2.0 + own.rank, dtype=dtype, device=device))
            works &= int(bool((got == right).all()))
        own.traffic.clear()
    except (RuntimeError, AttributeError, ImportError):
        works = 0
    everywhere = torch.tensor([works], device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
    return own if int(everywhere) else mesh
