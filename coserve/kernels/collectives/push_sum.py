"""A one-shot all-reduce in one kernel: each rank writes its numbers into the other ranks' memory, and adds up what was
written into its own.

A program pushes (writes) a block of x to all other ranks, then a flag behind it; it or another program waits for their
flags, and adds up. Data goes over NVLink once and nobody waits at the end: buffers alternate, and a rank that has the
flags of the next sum knows that the others have read those of this one. A block's place in the buffers, its flags and
its count of sums are its own, so that messages of all sizes and dtypes share them. The counts are on the device: CUDA
graphs can capture sums, and all ranks run the same ones in the same order, on one stream.

Of a small message each program pushes its blocks and then adds them up, which takes least time. Of a large one some
programs, the pushers, push while others, the adders, add up, so that NVLink and memory are busy at the same time. The
GPU starts programs in the order of their numbers. Pushers have the lowest numbers and never wait, so adders that wait
cannot keep them from running.

Letters: N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from coserve.kernels.collectives import kernel
from coserve.kernels.gpu.launcher import Launcher

WARPS = 4
MOST_PROGRAMS = 1024
"""A GPU runs so many at once: programs that wait for those of other ranks need not wait for places."""


@dataclass(frozen=True)
class PushShape:
    """How a message is cut into blocks, and which programs of the kernel push them and add them up."""

    block_bytes: int
    pushers: int = 0
    """Programs that push, beside `adders` that add up; 0: each program does both."""
    adders: int = 0

    def programs(self, blocks: int) -> int:
        return self.pushers + self.adders if self.pushers else min(blocks, MOST_PROGRAMS)


_launch = Launcher(kernel.push_sum)


def push_sum(
    x: Tensor,
    out: Tensor,
    own: Tensor,
    buffers: Tensor,
    flags: Tensor,
    flags_of_ranks: Tensor,
    counts: Tensor,
    rank: int,
    shape: PushShape,
    addend: Tensor | None = None,
) -> None:
    """Writes the sum of all ranks' `x`, and of `addend`, which is the same on all of them, into `out`; all are
    contiguous, of one dtype and shape.

    `own` (bytes): 2 · (N - 1) · blocks · `shape.block_bytes`, and `flags` (int32): (N - 1) · blocks, zeros at first, in
    memory that the other ranks write to; `buffers`, `flags_of_ranks` (int64, N): the addresses of all ranks' `own` and
    `flags`; `counts` (int32): 2 · blocks, zeros at first. All sums in this memory have one `shape`.
    """
    ranks, blocks, block = buffers.numel(), counts.numel() // 2, shape.block_bytes // x.element_size()
    used = triton.cdiv(x.numel(), block)
    assert used <= blocks, f"expected at most {blocks * block} numbers, got {x.numel()}"
    tensors = [x, out, own.view(x.dtype), buffers, flags, flags_of_ranks, counts, x if addend is None else addend]
    _launch(
        (shape.programs(used), 1, 1),
        tensors,
        (x.numel(), blocks),
        RANK=rank,
        RANKS=ranks,
        BLOCK=block,
        ADDS=addend is not None,
        PUSHERS=shape.pushers,
        num_warps=WARPS,
    )
