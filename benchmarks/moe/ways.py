"""Ways by which two GPUs of one host send activations to each other and answer: each kernel and copy is on the stream,
so CUDA graphs capture them. The receiver waits for a flag in its own memory, which the sender sets behind the data."""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

ITEM = 2
"""Bytes of an element: bfloat16."""
PAGE = 4096
"""Bytes at the end of a buffer for the flag of `Copied`."""


@triton.jit
def _push(x, theirs, flags, counts, numbers, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    """Write a block of x (numbers) to the peer's memory, then this message's number to the block's flag there."""
    block = tl.program_id(0)
    count = tl.load(counts + block) + 1
    at = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(theirs + at, tl.load(x + at, mask=at < numbers), mask=at < numbers)
    tl.debug_barrier()  # all threads have written before one sets the flag
    tl.atomic_xchg(flags + block, count, sem="release", scope="sys")
    tl.store(counts + block, count)


@triton.jit
def _await(flags, counts):  # noqa: ANN001, ANN202
    """Wait until the flag of a block has this message's number."""
    block = tl.program_id(0)
    count = tl.load(counts + block) + 1
    seen = tl.atomic_add(flags + block, 0, sem="acquire", scope="sys")
    while seen - count < 0:
        seen = tl.atomic_add(flags + block, 0, sem="acquire", scope="sys")
    tl.store(counts + block, count)


@triton.jit
def _take(flag):  # noqa: ANN001, ANN202
    """Wait until the flag is 1, and set it to 0."""
    seen = tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys")
    while seen != 1:
        seen = tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys")


class Way(Protocol):
    """One way to send to the other rank of the pair; both ranks call the same constructor at the same time."""

    own: Tensor
    """Where messages of the other rank arrive."""

    def send(self, x: Tensor) -> None: ...

    def receive(self, numbers: int) -> None:
        """Wait for a message of so many elements."""
        ...


class Sent:
    """torch.distributed's send and receive: NCCL on GPUs, gloo on CPUs."""

    def __init__(self, most: int, peer: int, device: torch.device) -> None:
        self.own, self._peer = torch.zeros(most, dtype=torch.bfloat16, device=device), peer

    def send(self, x: Tensor) -> None:
        dist.send(x, self._peer)

    def receive(self, numbers: int) -> None:
        dist.recv(self.own[:numbers], self._peer)


class _Symmetric:
    """Memory that both GPUs write to, without multicast."""

    def __init__(self, most: int, peer: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD
        assert group is not None, "expected a process group"
        size = -(-most * ITEM // PAGE) * PAGE + PAGE
        memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(memory, group)
        if self._handle.multicast_ptr:
            raise RuntimeError("expected symmetric memory without multicast")
        memory.zero_()
        self.own, self._peer = memory[: most * ITEM].view(torch.bfloat16), peer
        self._flag = memory[size - PAGE :].view(torch.int32)
        theirs: Tensor = self._handle.get_buffer(peer, (size,), torch.uint8)
        self._theirs = theirs[: most * ITEM].view(torch.bfloat16)
        self._their_flag = theirs[size - PAGE :].view(torch.uint32)


class Signalled(_Symmetric):
    """The copy engine, and symmetric memory's own signals."""

    def send(self, x: Tensor) -> None:
        self._theirs[: len(x)].copy_(x)
        self._handle.put_signal(self._peer, 0)

    def receive(self, numbers: int) -> None:
        self._handle.wait_signal(self._peer, 0)


class Copied(_Symmetric):
    """The copy engine, and a flag that the stream writes without a kernel; the receiver waits by one small kernel."""

    def send(self, x: Tensor) -> None:
        self._theirs[: len(x)].copy_(x)
        torch.ops.symm_mem.stream_write_value32_(self._their_flag, 0, 1)

    def receive(self, numbers: int) -> None:
        _take[(1,)](self._flag, num_warps=1)


class Pushed(_Symmetric):
    """A kernel that writes data and flags, and one that waits for them."""

    def __init__(self, most: int, peer: int, device: torch.device, block: int) -> None:
        super().__init__(most, peer, device)
        blocks = triton.cdiv(most, block)
        flags = _Symmetric(2 * blocks, peer, device)  # 4 bytes each, in elements of 2
        self._flags, self._flags_there = (x.view(torch.int32) for x in (flags.own, flags._theirs))
        self._counts = torch.zeros(2, blocks, dtype=torch.int32, device=device)
        self._block, self._kept = block, flags

    def send(self, x: Tensor) -> None:
        grid = (triton.cdiv(len(x), self._block),)
        _push[grid](x, self._theirs, self._flags_there, self._counts[0], len(x), BLOCK=self._block, num_warps=4)

    def receive(self, numbers: int) -> None:
        _await[(triton.cdiv(numbers, self._block),)](self._flags, self._counts[1], num_warps=1)


def make_ways(most: int, peer: int, device: torch.device) -> dict[str, Way]:
    """Return the ways by name, for messages of up to `most` elements."""
    if device.type == "cpu":
        return {"send": Sent(most, peer, device)}
    return {
        "push_2048": Pushed(most, peer, device, 2048),
        "push_8192": Pushed(most, peer, device, 8192),
        "signal": Signalled(most, peer, device),
        "send": Sent(most, peer, device),
        "copy": Copied(most, peer, device),  # last: if the stream cannot write the flag, the peer's GPU waits for ever
    }
