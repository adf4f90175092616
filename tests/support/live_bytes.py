"""What torch holds in memory at a time, by counting the storages that live: the CPU's answer to CUDA's statistics."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

BLOCK = 512
"""Bytes; CUDA's allocator gives multiples of it."""


class LiveBytes(TorchDispatchMode):
    """`finetune.memory_profiling.MemoryMeter` of what is made inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self._live = self._peak = 0
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._seen:
                size = -(-storage.nbytes() // BLOCK) * BLOCK
                self._seen[storage] = size
                weakref.finalize(storage, self._freed, size)
                self._live += size
                self._peak = max(self._peak, self._live)
        return out

    def _freed(self, size: int) -> None:
        self._live -= size

    def now(self) -> int:
        return self._live

    def peak(self) -> int:
        return self._peak

    def reset(self) -> None:
        self._peak = self._live
