"""The ranks that hold one base together, and the collectives that they run.

Every rank calls the same collectives in the same order. Results have the same bits on every rank, so that ranks which
compute the same thing from them, a sampled token for one, agree without a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from coserve.core.errors import EngineFault
from coserve.model.parallel.guard import NoPeers, SliceGuard

_ALL_GATHER: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch 2.13 renames it."""


ONE_SHOT_BYTES = {2: 1 << 20, 4: 1 << 20, 8: 1 << 18}
"""Largest message whose sum takes a `SymmetricMesh` less time than an all-gather takes NCCL, by ranks. Of eight ranks
not measured."""
ONE_SHOT_ALIGNMENT = 16
ADDING_RANKS = {2}
"""With so many ranks every sum of a step goes by our own kernel, which can add the residual (`parallel.residual`). With
others some go by NCCL, which needs another pass for it."""


def fits_one_shot(size: int, ranks: int) -> bool:
    """Whether a `SymmetricMesh` sums `size` bytes faster than NCCL gathers them."""
    return 0 < size <= ONE_SHOT_BYTES.get(ranks, 0) and size % ONE_SHOT_ALIGNMENT == 0


class Collective(NamedTuple):
    """What a rank contributes to one."""

    name: str
    numbers: int
    """Elements of its tensor."""
    dtype: torch.dtype


@dataclass
class Traffic:
    """What a mesh has sent. A CUDA graph's collectives count when it is captured, and not when it is replayed, unless
    they were `held`."""

    calls: Counter[str] = field(default_factory=Counter)
    """By the name of the collective."""
    bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of the tensor that a rank contributes, by the name of the collective."""

    _held: list[Collective] | None = field(default=None, init=False)

    def add(self, name: str, x: Tensor) -> None:
        """A collective is about to begin."""
        one = Collective(name, x.numel(), x.dtype)
        if self._held is None:
            self.begin([one])
        else:
            self._held.append(one)

    def begin(self, collectives: Sequence[Collective]) -> None:
        """These are about to begin, in this order."""
        for name, numbers, dtype in collectives:
            self.calls[name] += 1
            self.bytes[name] += numbers * dtype.itemsize

    @contextmanager
    def held(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        """Around the capture of a CUDA graph: collectives inside do not begin. What it gives launches the graph, with
        which all of them do. It raises `EngineFault` where the launch of a graph with collectives fails: the other
        ranks wait for them."""
        found: list[Collective] = []

        def launch(graph: Callable[[], None]) -> None:
            self.begin(found)
            try:
                graph()
            except RuntimeError as error:
                if found:
                    raise EngineFault(
                        "a CUDA graph could not be launched, and other ranks wait for its sums"
                    ) from error
                raise

        self._held = found
        try:
            yield launch
        finally:
            self._held = None

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()


class Mesh:
    """The mesh of one rank: every collective returns what it is given. Base class of meshes of several."""

    rank: int = 0
    size: int = 1
    note: str = ""
    """What an operator should know of how it sends."""
    adds_at_once: bool = True
    """`all_reduce` adds an addend without a pass of its own, or there is no GPU that would wait for it."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.guard: SliceGuard = NoPeers()
        """Keeps the ranks together in work that has collectives; those of an engine have a `Lockstep`."""

    def all_reduce(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """The sum of all ranks' `x`, and of `addend`, which has its shape and dtype and is the same on all of them; may
        be `x` itself, overwritten. Not
        differentiable: see `functions`."""
        return x if addend is None else x + addend

    def sum_apart(self, x: Tensor) -> Tensor:
        """As `all_reduce`, in memory of its own: `x` stays as it is."""
        return self.all_reduce(x.clone(memory_format=torch.contiguous_format))

    def one_shot(self, size: int) -> bool:
        """Whether a sum of zero-padded parts, `size` bytes in all, is a faster all-gather than the collective of that
        name (`SymmetricMesh`)."""
        return False

    def all_gather_parts(self, x: Tensor) -> Tensor:
        """(N, *x.shape): all ranks' `x`, of one shape, in the order of ranks. Not differentiable."""
        return x[None]

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """All ranks' `x`, of one shape, side by side along `dim` in the order of ranks. Not differentiable."""
        return x if self.size == 1 else torch.cat(self.all_gather_parts(x).unbind(0), dim)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Rank `root`'s `x`, written into `x`, which has one shape and dtype on all ranks."""
        return x

    def close(self) -> None:
        """Leaves the group. Waits for nobody."""

    def __deepcopy__(self, memo: dict[int, object]) -> Mesh:
        """Modules that are copied stay in the same group."""
        return self


class GroupMesh(Mesh):
    """A mesh over a torch.distributed process group: gloo on CPU, NCCL on CUDA, whose collectives CUDA graphs can
    capture."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.rank, self.size = group.rank(), group.size()

    def all_reduce(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        self.traffic.add("all_reduce", x)  # from here on the other ranks wait for this one: what may fail comes first
        dist.all_reduce(x, group=self.group)
        return x if addend is None else x.add_(addend)

    def all_gather_parts(self, x: Tensor) -> Tensor:
        x, parts = x.contiguous(), x.new_empty((self.size, *x.shape))
        self.traffic.add("all_gather", x)
        _ALL_GATHER(parts.view(-1), x.view(-1), group=self.group)
        return parts

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        self.traffic.add("broadcast", x)
        assert x.is_contiguous(), "expected a contiguous tensor to receive into"
        dist.broadcast(x, group_src=root, group=self.group)
        return x

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class LoneRank(Mesh):
    """One rank of a mesh without the others: its shapes are right, its results are not. For compiling and measuring."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size, self.adds_at_once = rank, size, size in ADDING_RANKS

    def one_shot(self, size: int) -> bool:
        return fits_one_shot(size, self.size)

    def all_gather_parts(self, x: Tensor) -> Tensor:
        return torch.stack([x] * self.size)
