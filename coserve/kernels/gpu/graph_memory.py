"""Records functions as CUDA graphs in one memory pool, which eager runs of the same work share until they are
recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from coserve.kernels.gpu.capture import captured, free_cached


class Recorder(Protocol):
    """Records the launches of functions, to replay them. One sequence of recordings runs at a time, as all share
    memory."""

    @property
    def bytes(self) -> int:
        """Bytes that the recordings hold."""
        ...

    def pool_of_pass(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes a context manager, for each layer of a forward or backward pass that is not
        recorded.

        New tensors inside come from the recordings' memory pool.
        """
        ...

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run `run` once and record it. Return a function that replays it, and the tensor that every replay writes."""
        ...


class GraphMemory:
    """A `Recorder` that captures a CUDA graph per function, in a memory pool of its own."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        held: Callable[[], AbstractContextManager[Callable[[Callable[[], None]], None]]] = lambda: nullcontext(_call),
    ) -> None:
        """`stream`: used for captures only. Launches of other threads on it would be captured, too.

        Graphs keep the stream's multiprocessors and priority, but run on the stream that is current when they are
        launched. `held` is entered around each capture; the function that it yields launches that graph: see
        `Traffic.held` of tensor-parallel ranks.
        """
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
            # The captures' stream, because torch's allocator keeps memory by stream.
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
