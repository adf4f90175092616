"""What torch holds in memory at a time, by counting the storages that live: CUDA's statistics for tensors without a
GPU.

torch has a tracker too (`torch.distributed._tools.mem_tracker`); its peak cannot be reset, and it needs a module's
hooks. `tests/profiling` compares the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

BLOCK = 512
"""Bytes; CUDA's allocator gives multiples of it."""


def rounded(size: int) -> int:
    """Bytes that CUDA's allocator counts for `size`, where it cuts a larger block."""
    return -(-size // BLOCK) * BLOCK


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """`finetune.memory_profiling.MemoryMeter` of what is made inside `with`: load the model inside, too. What was made
    before counts once an op returns a view of it."""

    def __init__(self, workspace: Callable[[str, Sequence[Any]], int] = lambda op, args: 0) -> None:
        """`workspace`: bytes that a GPU's kernel of an op takes while it runs, by the op's name and arguments."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._workspace = workspace
        self._live = self._peak = 0
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's own signature
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._seen:
                size = rounded(storage.nbytes())
                self._seen[storage] = size
                weakref.finalize(storage, self._freed, size)
                self._live += size
        self._peak = max(self._peak, self._live + rounded(self._workspace(func.name(), args)))
        return out

    def _freed(self, size: int) -> None:
        self._live -= size

    def now(self) -> int:
        return self._live

    def peak(self) -> int:
        return self._peak

    def reset(self) -> None:
        self._peak = self._live
