"""Shared memory of one-kernel all-reduces (`kernels.collectives.push_sum`) among the GPUs of one host over NVLink."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from coserve.kernels.collectives.push_sum import PushShape, push_sum

ALIGNMENT = 16
"""Bytes that the kernel reads at once."""


class PushSum:
    """Computes sums of up to `most` bytes, by kernels of one shape."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, most: int, shape: PushShape) -> None:
        """All ranks call this at the same time. Raises `RuntimeError` if their GPUs cannot access each other's
        memory."""
        self.most, self._shape, self._rank = most, shape, group.rank()
        blocks, ranks = most // shape.block_bytes, group.size()
        self._own, self._buffers = _shared_bytes(2 * (ranks - 1) * most, group, device)
        flags, self._flags_of_ranks = _shared_bytes(4 * (ranks - 1) * blocks, group, device)
        self._flags = flags.view(torch.int32)
        self._counts = torch.zeros(2 * blocks, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)

    def __call__(self, x: Tensor, out: Tensor, addend: Tensor | None = None) -> None:
        """Write the sum of all ranks' `x` into `out`, plus `addend`, which must be equal on all ranks.

        All are contiguous, aligned, of one floating dtype, and have up to `most` bytes. Before the first call, all
        ranks must have made their `PushSum`, so that flags are zero. Allocates nothing.
        """
        push_sum(
            x,
            out,
            self._own,
            self._buffers,
            self._flags,
            self._flags_of_ranks,
            self._counts,
            self._rank,
            self._shape,
            addend,
        )


def _shared_bytes(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate zeros (uint8) that the other ranks may read and write. Also return the addresses of all ranks' (int64,
    N).

    All ranks call this at the same time. Raises `RuntimeError` if they cannot.
    """
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group)
    if handle.multicast_ptr:
        raise RuntimeError("expected symmetric memory without multicast")
    return own.zero_(), torch.tensor([*handle.buffer_ptrs], dtype=torch.int64, device=device)
