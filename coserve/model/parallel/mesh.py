"""The mesh: the tensor-parallel ranks that hold one base together, and their collectives.

Every rank calls the same collectives in the same order. Results have the same bits on every rank, so ranks that compute
the same thing from them, such as a sampled token, agree without a message.
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
from coserve.model.parallel.guard import SliceGuard

_ALL_GATHER: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch 2.13 renames this function."""


ONE_SHOT_BYTES = {2: 1 << 20, 4: 1 << 20, 8: 1 << 18}
"""Largest message, in bytes, that a `SymmetricMesh` sums faster than NCCL gathers it, by number of ranks. Not measured
for eight."""
ONE_SHOT_ALIGNMENT = 16
ADDING_RANKS = {2}
"""Numbers of ranks at which every sum of a step uses our own kernel, which can add the residual (`parallel.residual`).
With other numbers some sums use NCCL, and adding the residual takes another kernel."""


def fits_one_shot(size: int, ranks: int) -> bool:
    """Whether a `SymmetricMesh` sums `size` bytes faster than NCCL gathers them."""
    return 0 < size <= ONE_SHOT_BYTES.get(ranks, 0) and size % ONE_SHOT_ALIGNMENT == 0


class Collective(NamedTuple):
    """One rank's contribution to a collective."""

    name: str
    numbers: int
    """Number of elements of the tensor."""
    dtype: torch.dtype


@dataclass
class Traffic:
    """Counts the collectives of a mesh.

    A CUDA graph's collectives count when it is captured, not when it is replayed, unless they were `held`.
    """

    calls: Counter[str] = field(default_factory=Counter)
    """Calls by name of the collective."""
    bytes: Counter[str] = field(default_factory=Counter)
    """Bytes that a rank contributes, by name of the collective."""

    _held: list[Collective] | None = field(default=None, init=False)

    def add(self, name: str, x: Tensor) -> None:
        """Count a collective that is about to begin."""
        one = Collective(name, x.numel(), x.dtype)
        if self._held is None:
            self.begin([one])
        else:
            self._held.append(one)

    def begin(self, collectives: Sequence[Collective]) -> None:
        """Count collectives that are about to begin, in this order."""
        for name, numbers, dtype in collectives:
            self.calls[name] += 1
            self.bytes[name] += numbers * dtype.itemsize

    @contextmanager
    def held(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        """Hold back the collectives of a CUDA graph that is captured inside, and yield a function that launches the
        graph.

        The function begins the held collectives. It raises `EngineFault` if the launch of a graph with collectives
        fails, because the other ranks wait for them.
        """
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
    """A mesh of one rank: every collective returns its input. Base class of meshes of several ranks."""

    rank: int = 0
    size: int = 1
    note: str = ""
    """A note for operators about how it sends."""
    adds_at_once: bool = True
    """Whether `all_reduce` adds an addend without a kernel of its own. True without a GPU, where it does not matter."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.guard = SliceGuard()
        """Keeps the ranks together in work with collectives; in an engine, a `Lockstep`."""

    def all_reduce(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """Return the sum of all ranks' `x` plus `addend`, which has its shape and dtype and is equal on all ranks.

        May overwrite and return `x`. Not differentiable: see `functions`.
        """
        return x if addend is None else x + addend

    def all_reduce_out_of_place(self, x: Tensor) -> Tensor:
        """Compute `all_reduce` into new memory, without changing `x`."""
        return self.all_reduce(x.clone(memory_format=torch.contiguous_format))

    def one_shot(self, size: int) -> bool:
        """Whether a sum of zero-padded shards, `size` bytes in all, is faster than an all-gather (`SymmetricMesh`)."""
        return False

    def all_gather_parts(self, x: Tensor) -> Tensor:
        """Return all ranks' `x`, of one shape, stacked in the order of ranks: (N, *x.shape). Not differentiable."""
        return x[None]

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate all ranks' `x`, of one shape, along `dim` in the order of ranks. Not differentiable."""
        return x if self.size == 1 else torch.cat(self.all_gather_parts(x).unbind(0), dim)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Write rank `root`'s `x` into `x`, which has one shape and dtype on all ranks, and return it."""
        return x

    def __deepcopy__(self, memo: dict[int, object]) -> Mesh:
        """Return itself: copied modules stay in the same group."""
        return self


class GroupMesh(Mesh):
    """A mesh over a torch.distributed process group: gloo on CPU; NCCL on CUDA, whose collectives CUDA graphs can
    capture."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.rank, self.size = group.rank(), group.size()

    def all_reduce(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        self.traffic.add("all_reduce", x)  # the other ranks wait for this one from here on: what may fail comes first
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


class LoneRank(Mesh):
    """One rank without the others: its shapes are right, its results are not. For compiling and measuring."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size, self.adds_at_once = rank, size, size in ADDING_RANKS

    def one_shot(self, size: int) -> bool:
        return fits_one_shot(size, self.size)

    def all_gather_parts(self, x: Tensor) -> Tensor:
        return torch.stack([x] * self.size)
