"""A mesh with one-kernel all-reduces for messages of up to some megabytes, in memory that the GPUs of one host share,
and NCCL for larger ones. It never uses NVLink multicast."""

from __future__ import annotations

import itertools
import logging
import os

import torch
import torch.distributed as dist
from torch import Tensor

from coserve.kernels.collectives.push_sum import PushShape, push_sum
from coserve.kernels.gpu.launcher import compile_only
from coserve.model.parallel.mesh import ADDING_RANKS, GroupMesh, fits_one_shot

ALIGNMENT = 16
"""Bytes that the kernel reads at once."""

log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SMALL, _LARGE = PushShape(2048), PushShape(8192, pushers=512, adders=512)
_TWO_SHOT = PushShape(8192, pushers=512, adders=256, copiers=256)
PUSHED = {
    2: ((1 << 20, _SMALL), (32 << 20, _LARGE)),
    4: ((1 << 19, _SMALL), (32 << 20, _TWO_SHOT)),
    8: ((1 << 18, _SMALL),),
}
"""(Largest message, kernel shape) of the one-kernel all-reduces, by number of ranks.

A one-shot sum takes 2 · (N - 1) times the largest message in memory, a two-shot one 3.5 times on four ranks. On two and
four GPUs these are faster than NCCL at nearly all sizes (`bdlora.json`, all_reduce_us), and a CUDA graph with NCCL's
kernels costs the host 1.2 ms a launch. On eight they are not measured.
"""

MULTIPLE = 16
"""The kernel sums only messages whose number of elements is a multiple of this; NCCL sums the others. Triton would
compile a variant for them while the other ranks wait."""


def set_up_collectives() -> None:
    """Set NCCL's environment for this process and its children. Call it before the first CUDA collective.

    It turns off NVLink multicast, and the registration of buffers during graph captures. With registration, either all
    ranks or none would have to run a collective in a graph.
    """
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
    os.environ["NCCL_GRAPH_REGISTER"] = "0"


class SymmetricMesh(GroupMesh):
    """NCCL, and the one-kernel all-reduce for messages up to some megabytes. CUDA graphs can capture both."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks call this at the same time. Raises `RuntimeError` if their GPUs cannot access each other's
        memory."""
        super().__init__(group)
        self._device, self.adds_at_once = device, self.size in ADDING_RANKS
        self._pushes = [PushSum(group, device, most=most, shape=shape) for most, shape in PUSHED.get(self.size, ())]

    def one_shot(self, size: int) -> bool:
        return fits_one_shot(size, self.size)

    def all_reduce(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        push = self._push_of(x)
        if push is None:
            return super().all_reduce(x, addend)
        x, addend = _readable(x), None if addend is None else _readable(addend)
        out = torch.empty_like(x)
        self.traffic.add("all_reduce", x)  # nothing after this may fail: the other ranks wait for this one
        push(x, out, addend)
        return out

    def all_reduce_out_of_place(self, x: Tensor) -> Tensor:
        return super().all_reduce_out_of_place(x) if self._push_of(x) is None else self.all_reduce(x)

    def _push_of(self, x: Tensor) -> PushSum | None:
        if x.dtype not in _DTYPES or not x.nbytes or x.numel() % MULTIPLE:
            return None
        return next((push for push in self._pushes if x.nbytes <= push.most), None)

    def compile(self) -> None:
        """Compile the kernels for this process."""
        with compile_only(None):
            launch_sums(self.rank, self.size, self._device)

    def works(self) -> bool:
        """Whether sums of small and of large messages are right, twice, the second time with an addend.

        All ranks call this at the same time.
        """
        for dtype, size, more in itertools.product(_DTYPES, (64, *(push.most for push in self._pushes)), (0, 1)):
            numbers_K = torch.arange(size // dtype.itemsize, device=self._device) % 13
            found_K = self.all_reduce((numbers_K + self.rank).to(dtype), numbers_K.to(dtype) if more else None)
            if not torch.equal(found_K.long(), (self.size + more) * numbers_K + sum(range(self.size))):
                return False
        return True


def launch_sums(rank: int, ranks: int, device: torch.device) -> None:
    """Launch every kernel that sums of a `SymmetricMesh` use on this rank, inside `compile_only`, to compile them.

    The tensors have the types and alignments of real ones, but almost no memory.
    """
    own = torch.empty(ALIGNMENT, dtype=torch.uint8, device=device)
    addresses = torch.empty(ranks, dtype=torch.int64, device=device)
    number = torch.empty(1, dtype=torch.int32, device=device)
    for dtype, (most, shape) in itertools.product(_DTYPES, PUSHED.get(ranks, ())):
        x = torch.empty(1, dtype=dtype, device=device).expand(most // dtype.itemsize)
        counts = number.expand(shape.counts(most // shape.block_bytes))
        for addend in (None, x):
            push_sum(x, x, own, addresses, number, addresses, counts, rank, shape, addend)


def _readable(x: Tensor) -> Tensor:
    """Return the tensor as the kernel can read it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def symmetric_mesh(group: dist.ProcessGroup, device: torch.device) -> GroupMesh:
    """Return a `SymmetricMesh` if it works on every rank, else NCCL alone. All ranks call this at the same time."""
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
    mesh.adds_at_once = False
    mesh.note = (
        "ranks: NCCL alone sums up, which takes longer for small messages: the all-reduce in one kernel does not work "
        f"here: {why}"
    )
    log.warning("%s", mesh.note)
    return mesh


class PushSum:
    """Computes sums of up to `most` bytes, by kernels of one shape."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, most: int, shape: PushShape) -> None:
        """All ranks call this at the same time. Raises `RuntimeError` if their GPUs cannot access each other's
        memory."""
        self.most, self._shape, self._rank = most, shape, group.rank()
        blocks, ranks = most // shape.block_bytes, group.size()
        self._own, self._buffers = _shared_bytes(shape.own_bytes(ranks, most), group, device)
        flags, self._flags_of_ranks = _shared_bytes(4 * shape.flags(ranks, blocks), group, device)
        self._flags = flags.view(torch.int32)
        self._counts = torch.zeros(shape.counts(blocks), dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)

    def __call__(self, x: Tensor, out: Tensor, addend: Tensor | None = None) -> None:
        """Write the sum of all ranks' `x` into `out`, plus `addend`, which must be equal on all ranks.

        All are contiguous, aligned, of one floating dtype, and have up to `most` bytes. Before the first call, all
        ranks must have made their `PushSum`, so that flags are zero. Allocates nothing.
        """
        memory = self._own, self._buffers, self._flags, self._flags_of_ranks, self._counts
        push_sum(x, out, *memory, self._rank, self._shape, addend)


def _shared_bytes(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate zeros (uint8) that the other ranks may read and write. Also return the addresses of all ranks' memory:
    int64 (N).

    All ranks call this at the same time. Raises `RuntimeError` if their GPUs cannot access each other's memory.
    """
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group)
    if handle.multicast_ptr:
        raise RuntimeError("expected symmetric memory without multicast")
    return own.zero_(), torch.tensor([*handle.buffer_ptrs], dtype=torch.int64, device=device)
