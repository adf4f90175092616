"""Memory that CUDA graphs share with what is computed in their place until they are captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from coserve.kernels.gpu.capture import captured


class Recorder(Protocol):
    """Records what functions launch, to launch it again. One sequence of recordings runs at a time: what they compute lies in the same
    memory."""

    @property
    def bytes(self) -> int:
        """That it holds."""
        ...

    def uncaptured(self) -> AbstractContextManager[None]:
        """What runs inside, unrecorded, has its new tensors in the recordings' memory."""
        ...

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What runs `run` again, and the tensor that it gives, whichever time; it is run once."""
        ...


class GraphMemory:
    """Implements `Recorder` with a CUDA graph for each function, in one memory pool of their own."""

    def __init__(self, device: torch.device) -> None:
        """On the stream that runs the graphs. Captures have that stream's multiprocessors and priority, which graphs keep."""
        current = torch.cuda.current_stream(device)
        alone = current == torch.cuda.default_stream(device)  # which cannot be captured
        self._pool = torch.cuda.MemPool()
        self._stream = torch.cuda.Stream(device) if alone else current  # type: ignore[no-untyped-call]

    @property
    def bytes(self) -> int:
        segments = self._pool.snapshot()  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in segments)

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        # The stream of the captures, as torch's allocator keeps memory by stream.
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool):
            yield
        before.wait_stream(self._stream)

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with captured(graph, self._pool.id, self._stream):
            found = run()
        graph.replay()
        return graph.replay, found
