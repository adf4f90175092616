"""Where memory is measured: on a GPU, or with fake tensors in its place."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from coserve.finetune.memory_profiling import CudaMemoryMeter, MemoryMeter
from coserve.kernels.attention.interface import Attention, TokenRun
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.backend import choose_backend
from coserve.kernels.lora.interface import LoraBackend
from coserve.memory.kv import KvCache
from tests.support import predicted_memory as predicted


@dataclass(frozen=True)
class Place:
    """The GPU, or its stand-in, with its meter and the operations of a base that run there."""

    device: torch.device
    meter: MemoryMeter
    backend: LoraBackend
    training_attention: Callable[[Sequence[int]], Attention]
    paged_attention: Callable[[KvCache, Sequence[TokenRun]], Attention]
    measured: bool

    def free(self) -> None:
        """Give back what nothing holds any more."""
        gc.collect()
        if self.measured:
            torch.cuda.empty_cache()


@contextlib.contextmanager
def place(dtype: torch.dtype, *, measured: bool) -> Iterator[Place]:
    """`dtype`: of the base; `measured`: on this machine's GPU."""
    if measured:
        device = torch.device("cuda")
        backend = choose_backend("auto", device, dtype)
        yield Place(device, CudaMemoryMeter(device), backend, PackedAttention, KvCache.attention, measured=True)
        return
    with predicted.fake_tensors() as meter:
        cpu, fake = torch.device("cpu"), predicted.FakeSegmentedBackend()
        yield Place(cpu, meter, fake, predicted.FlashAttention, predicted.paged_attention, measured=False)
