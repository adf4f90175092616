"""Memory held by torch over time, counted from live storages: a stand-in for CUDA's statistics without a GPU.

torch has a tracker too (`torch.distributed._tools.mem_tracker`), but its peak cannot be reset, and it needs module
hooks. `tests/benchmarks/test_profile_readings.py` compares the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

BLOCK = 512
"""Granularity of CUDA's allocator, in bytes."""


def rounded(size: int) -> int:
    """Bytes that CUDA's allocator counts for `size`, when it splits a larger block."""
    return -(-size // BLOCK) * BLOCK


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """A `finetune.memory_profiling.MemoryMeter` of tensors made inside `with`; load the model inside, too. Earlier
    tensors count once an op returns a view of them."""

    def __init__(self, workspace: Callable[[str, Sequence[Any]], int] = lambda op, args: 0) -> None:
        """`workspace`: returns the temporary bytes of an op's GPU kernel, given the op's name and arguments."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._workspace = workspace
        self._live = self._peak = 0
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if (
                isinstance(tensor, torch.Tensor)
                and not (tensor.is_mkldnn or tensor.is_meta)
                and (storage := tensor.untyped_storage()) not in self._seen
            ):
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
