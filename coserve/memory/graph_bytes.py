"""Measures how much GPU memory CUDA graphs take, around each piece of a capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

DRIVER = 64 << 20
"""Most bytes that the driver allocates for one piece of a capture. A larger increase comes from another process."""


class Captures(Protocol):
    """The memory pool and stream in which graphs are captured: `generate.execution.graphs.shared.GraphPool`."""

    @property
    def memory(self) -> tuple[int, int]:
        """The memory pool."""
        ...

    @property
    def stream(self) -> torch.cuda.Stream: ...


class CudaMemory:
    """Reads the device's memory use, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def reserved(self) -> int:
        """Bytes reserved by this process's allocator."""
        return torch.cuda.memory_reserved(self._device)

    def held(self, captures: Captures) -> int:
        """Bytes reserved for the captures' pool, and for their stream outside of it."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(
            segment["total_size"]
            for segment in segments
            if segment["segment_pool_id"] == captures.memory
            or (segment["segment_pool_id"] == (0, 0) and segment["stream"] == captures.stream.cuda_stream)
        )


class GraphBytes:
    """Total bytes of the captured graphs; grows with each capture. Allocations of other threads, for jobs that start,
    are excluded."""

    def __init__(self, memory: CudaMemory | None) -> None:
        """`memory` is None on a CPU, where nothing is captured or counted."""
        self._memory = memory
        self._before: int | None = None
        """Bytes that the stream held before the first capture; ordinary steps may use them, too."""
        self._held = self._driver = 0
        self.complete = False
        """Whether all graphs known to be needed are captured."""

    @property
    def size(self) -> int:
        """Bytes of the graphs so far: their pool, the memory that their warm-ups left on the stream, and the driver's
        own."""
        return self._held + self._driver

    @contextmanager
    def capturing(self, captures: Captures | None) -> Iterator[None]:
        """Measure one piece of a capture inside. Call it on the engine's thread."""
        memory = self._memory
        if memory is None or captures is None:
            yield
            return
        if self._before is None:
            self._before = memory.held(captures)
        free, reserved = memory.free(), memory.reserved()
        try:
            yield
        finally:
            grown = memory.reserved() - reserved
            self._driver += min(DRIVER, max(0, free - memory.free() - grown))
            if grown:
                self._held = max(0, memory.held(captures) - self._before)
