"""All-reduces in one kernel: each rank writes its data into the other ranks' memory, then adds up what the others
wrote into its own.

A program pushes (writes) a block of x to all other ranks, and sets a flag after it. The same or another program waits
for the other ranks' flags and adds up their blocks. Data crosses NVLink once and there is no barrier at the end:
buffers alternate, and a rank that sees the flags of the next sum knows that the others have read the blocks of this
one. Each block has its own place in the buffers, flags and count of sums, so that messages of all sizes and dtypes
share them. The counts are on the device, so CUDA graphs can capture sums. All ranks must run the same sums in the same
order, on one stream.

For a small message each program pushes its blocks and then adds them up, which has the lowest latency. For a large one
some programs (pushers) only push while the others (adders) only add up, so that NVLink and memory are busy at the same
time. The GPU starts programs in the order of their indices. Pushers have the lowest indices and never wait, so waiting
adders cannot keep them from running.

A rank sends its data N - 1 times. From a certain size on, a two-shot sum is faster, which sends 2 (N - 1) / N times the
data: each block is pushed to one rank, which adds it up and pushes the sum to the others. Further programs (copiers)
wait for sums and copy them out of the buffers. A rank that has the sums of all others knows that they have ended their
previous kernel, so here, too, two buffers suffice, if each rank adds up at least one block.

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
"""Most programs of a sum. A GPU runs so many at once, so a program that waits for other ranks never waits for a free
multiprocessor."""


@dataclass(frozen=True)
class PushShape:
    """How a message is cut into blocks, and which programs push, add up and copy."""

    block_bytes: int
    pushers: int = 0
    """Programs that only push, while `adders` only add up; 0: each program does both."""
    adders: int = 0
    copiers: int = 0
    """Programs that only copy sums; 0: one-shot sums. Two-shot sums need some of each kind."""

    def programs(self, blocks: int) -> int:
        return self.pushers + self.adders + self.copiers if self.pushers else min(blocks, MOST_PROGRAMS)

    def own_bytes(self, ranks: int, most: int) -> int:
        """Memory that other ranks write to, for messages of up to `most` bytes."""
        return 2 * (ranks - 1) * most if not self.copiers else 2 * (ranks - 1) * most // ranks + 2 * most

    def flags(self, ranks: int, blocks: int) -> int:
        """Flags for messages of up to so many blocks, a multiple of `ranks`."""
        return (ranks - 1) * blocks if not self.copiers else (ranks - 1) * blocks // ranks + blocks

    def counts(self, blocks: int) -> int:
        return (3 if self.copiers else 2) * blocks


_launch, _launch_two_shot = Launcher(kernel.push_sum), Launcher(kernel.two_shot_sum)


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
    """Write the sum of all ranks' `x` into `out`, plus `addend`, which must be equal on all ranks. All three are
    contiguous, of one dtype and shape.

    `own` (`shape.own_bytes`) and `flags` (int32, `shape.flags`), initially zero: memory that the other ranks write to.
    `buffers`, `flags_of_ranks` (int64, N): the addresses of all ranks' `own` and `flags`. `counts` (int32,
    `shape.counts`): initially zero. All sums that use this memory have the same `shape`.
    """
    ranks, blocks, block = buffers.numel(), counts.numel() // shape.counts(1), shape.block_bytes // x.element_size()
    used = triton.cdiv(x.numel(), block)
    assert used <= blocks, f"expected at most {blocks * block} numbers, got {x.numel()}"
    tensors = [x, out, own.view(x.dtype), buffers, flags, flags_of_ranks, counts, x if addend is None else addend]
    launch, adders = _launch, dict[str, int]()
    if shape.copiers:
        assert used >= ranks and blocks % ranks == 0, f"expected a block for each of {ranks} ranks, got {used}"
        launch, adders = _launch_two_shot, {"ADDERS": shape.adders}
    launch(
        (shape.programs(used), 1, 1),
        tensors,
        (x.numel(), blocks),
        RANK=rank,
        RANKS=ranks,
        BLOCK=block,
        ADDS=addend is not None,
        PUSHERS=shape.pushers,
        **adders,
        num_warps=WARPS,
    )
