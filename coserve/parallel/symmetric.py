"""A mesh whose all-reduces are one kernel up to some megabytes (`parallel.push`); NCCL does the rest. NVLink multicast is never used."""

from __future__ import annotations

import itertools
import logging
import os

import torch
import torch.distributed as dist
from torch import Tensor

from coserve.kernels.gpu.launcher import compile_only
from coserve.parallel.mesh import GroupMesh, fits_one_shot
from coserve.parallel.push import ALIGNMENT, PushSum

log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PUSHED_BYTES = {2: 32 << 20, 4: 1 << 20, 8: 1 << 18}
"""Largest message of such an all-reduce, by ranks; a rank has 2 · (N - 1) times as much memory for it. On two GPUs it is faster than NCCL at all of these
sizes (`bdlora.json`, all_reduce_us); of four and eight ranks, to which each sends its numbers N - 1 times, not measured."""
BLOCK_BYTES = 4096


def set_up_collectives() -> None:
    """For this process and those that it starts: without NVLink multicast, and without buffers that NCCL registers while a graph is captured, as then
    all ranks would have to run a collective in a graph, or none. Call it before the first CUDA collective."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
    os.environ["NCCL_GRAPH_REGISTER"] = "0"


class SymmetricMesh(GroupMesh):
    """NCCL, and direct writes for messages of some megabytes. CUDA graphs can capture both."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks call this at once. Raises `RuntimeError` where their GPUs cannot read each other's memory."""
        super().__init__(group)
        most = PUSHED_BYTES.get(self.size, 0)
        self._device = device
        self._push = PushSum(group, device, most=most, block_bytes=BLOCK_BYTES) if most else None

    def one_shot(self, size: int) -> bool:
        return fits_one_shot(size, self.size)

    def all_reduce(self, x: Tensor) -> Tensor:
        push = self._push
        if push is None or x.dtype not in _DTYPES or not 0 < x.nbytes <= push.most:
            return super().all_reduce(x)
        x = x.contiguous()
        x = x.clone() if x.data_ptr() % ALIGNMENT else x
        out = torch.empty_like(x)
        self.traffic.add("all_reduce", x)  # from here on the other ranks wait for this one: nothing may fail
        push(x, out)
        return out

    def compile(self) -> None:
        """The kernel, for this process."""
        for dtype in _DTYPES if self._push is not None else ():
            x = torch.empty(64, dtype=dtype, device=self._device)
            with compile_only(None):
                self.all_reduce(x)

    def works(self) -> bool:
        """Whether sums are right, of small and of large messages, twice. All ranks call this at once."""
        most = 0 if self._push is None else self._push.most
        for dtype, size, _ in itertools.product(_DTYPES, (64, most), range(2)):
            numbers_K = torch.arange(size // dtype.itemsize, device=self._device) % 13
            found_K = self.all_reduce((numbers_K + self.rank).to(dtype))
            if not torch.equal(found_K.long(), self.size * numbers_K + sum(range(self.size))):
                return False
        return True


def symmetric_mesh(group: dist.ProcessGroup, device: torch.device) -> GroupMesh:
    """A `SymmetricMesh` where it works on every rank, else NCCL alone. All ranks call this at once."""
    mesh, own, why = GroupMesh(group), None, "another rank could not"

    def on_every_rank(found: bool) -> bool:
        everywhere = torch.tensor([int(found)], device=device)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
        return bool(everywhere)

    try:
        own = SymmetricMesh(group, device)
        own.compile()
    except Exception as error:  # noqa: BLE001 - whatever it is, NCCL does the same
        own, why = None, (str(error) or type(error).__name__).splitlines()[0]
    if on_every_rank(own is not None) and own is not None:
        if on_every_rank(own.works()):
            own.traffic.clear()
            return own
        why = "its sums are wrong"
    mesh.note = f"ranks: NCCL alone sums up, which takes longer for small messages: the all-reduce in one kernel does not work here: {why}"
    log.warning("%s", mesh.note)
    return mesh
