"""Memory that CUDA graphs share with what is computed in their place until they are captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from coserve.kernels.gpu.capture import captured, free_cached


class Recorder(Protocol):
    """Records what functions launch, to launch it again. One sequence of recordings runs at a time: what they compute
    lies in the same memory."""

    @property
    def bytes(self) -> int:
        """That it holds."""
        ...

    def pool_of_pass(self) -> Callable[[], AbstractContextManager[None]]:
        """For each layer of one pass: what runs inside is not recorded; its new tensors come from the recordings'
        memory pool."""
        ...

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What runs `run` again, and the tensor that it gives, whichever time; it is run once."""
        ...


class GraphMemory:
    """Implements `Recorder` with a CUDA graph for each function, in one memory pool of their own."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        held: Callable[[], AbstractContextManager[Callable[[Callable[[], None]], None]]] = lambda: nullcontext(_call),
    ) -> None:
        """`stream`: of the captures, and of nothing that other threads launch, which would be captured, too. Graphs
        keep its multiprocessors and its priority; they run on the stream that is current then. `held` is entered around
        each capture; what it gives launches that
        graph: see `Traffic.held` of ranks."""
        self._pool, self._stream, self._held = torch.cuda.MemPool(), stream, held

    @property
    def bytes(self) -> int:
        segments = self._pool.snapshot()  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in segments)

    def pool_of_pass(self) -> Callable[[], AbstractContextManager[None]]:
        freed = False

        @contextmanager
        def in_pool() -> Iterator[None]:
            nonlocal freed
            freed = freed or free_cached()
            with self._in_pool():
                yield

        return in_pool

    @contextmanager
    def _in_pool(self) -> Iterator[None]:
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        try:
            # The stream of the captures, as torch's allocator keeps memory by stream.
            with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool):
                yield
        finally:
            before.wait_stream(self._stream)

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with self._held() as launch, captured(graph, self._pool.id, self._stream):
            found = run()

        def replay() -> None:
            launch(graph.replay)

        replay()
        return replay, found


def _call(graph: Callable[[], None]) -> None:
    graph()
