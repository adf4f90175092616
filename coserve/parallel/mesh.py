"""The ranks that hold one base together, and the collectives that they run.

Every rank calls the same collectives in the same order. Results have the same bits on every rank, so that ranks which compute
the same thing from them, a sampled token for one, agree without a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

_ALL_GATHER: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch 2.13 renames it."""


@dataclass
class Traffic:
    """What a mesh has sent. A CUDA graph's collectives count when it is captured, not when it is replayed."""

    calls: Counter[str] = field(default_factory=Counter)
    """By the name of the collective."""
    bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of the tensor that a rank contributes, by the name of the collective."""

    def add(self, name: str, x: Tensor) -> None:
        self.calls[name] += 1
        self.bytes[name] += x.numel() * x.element_size()

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()


class Mesh:
    """The mesh of one rank: every collective returns what it is given. Base class of meshes of several."""

    rank: int = 0
    size: int = 1

    def __init__(self) -> None:
        self.traffic = Traffic()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`; may be `x` itself, overwritten. Not differentiable: see `functions`."""
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """All ranks' `x`, of one shape, side by side along `dim` in the order of ranks. Not differentiable."""
        return x

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Rank `root`'s `x`, written into `x`, which has one shape and dtype on all ranks."""
        return x

    def close(self) -> None:
        """Leaves the group. Waits for nobody."""

    def __deepcopy__(self, memo: dict[int, object]) -> Mesh:
        """Modules that are copied (`FusedBase.shadow`) stay in the same group."""
        return self


class GroupMesh(Mesh):
    """A mesh over a torch.distributed process group: gloo on CPU, NCCL on CUDA, whose collectives CUDA graphs can capture."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.rank, self.size = group.rank(), group.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        self.traffic.add("all_reduce", x)
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self.traffic.add("all_gather", x)
        parts = x.new_empty((self.size, *x.shape))
        _ALL_GATHER(parts.view(-1), x.contiguous().view(-1), group=self.group)
        return torch.cat(parts.unbind(0), dim)

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
        self.rank, self.size = rank, size

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat([x] * self.size, dim)
