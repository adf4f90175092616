"""How much GPU memory CUDA graphs take: measured around each piece of a capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

DRIVER = 64 << 20
"""Bytes; what the driver takes for one piece of a capture is less. More was taken by another process."""


class Captures(Protocol):
    """Where graphs are captured: `generate.execution.graphs.shared.GraphPool`."""

    @property
    def memory(self) -> tuple[int, int]:
        """The memory pool."""
        ...

    @property
    def stream(self) -> torch.cuda.Stream: ...


class ReadsMemory(Protocol):
    """The device's memory, in bytes."""

    def free(self) -> int: ...

    def reserved(self) -> int:
        """By this process's allocator."""
        ...

    def held(self, captures: Captures) -> int:
        """Reserved for the pool, and for the stream outside of it."""
        ...


class CudaMemory:
    """Implements `ReadsMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def held(self, captures: Captures) -> int:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(
            segment["total_size"]
            for segment in segments
            if segment["segment_pool_id"] == captures.memory
            or (segment["segment_pool_id"] == (0, 0) and segment["stream"] == captures.stream.cuda_stream)
        )


class GraphBytes:
    """Grows with each capture. Other threads allocate meanwhile, for jobs that start: what they take is not counted."""

    def __init__(self, memory: ReadsMemory | None) -> None:
        """None: on a CPU nothing is captured, and nothing counted."""
        self._memory = memory
        self._before: int | None = None
        """What the stream held before the first capture: steps may use it, too."""
        self._held = self._driver = 0
        self.complete = False
        """No graph is missing, as far as it is known now."""

    @property
    def size(self) -> int:
        """Bytes of the graphs so far: their pool, what their stream's warm-ups hold, and what the driver keeps of each
        graph."""
        return self._held + self._driver

    @contextmanager
    def capturing(self, captures: Captures | None) -> Iterator[None]:
        """Around one piece of a capture, on the engine's thread."""
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
