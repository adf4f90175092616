"""How much GPU memory CUDA graphs take: measured around each piece of a capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DRIVER = 64 << 20
"""Bytes; what the driver takes for one piece of a capture is less. More was taken by another process."""


class GraphBytes:
    """Grows with each capture. On a CPU nothing is captured, and nothing counted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.size = 0
        """Bytes of the graphs so far: their pool, what their stream's warm-ups hold, and what the driver keeps of each graph."""
        self.complete = False
        """No graph is missing, as far as it is known now."""

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Around one piece of a capture, on the engine's thread."""
        if self._device.type != "cuda":
            yield
            return
        free, reserved = self._read()
        try:
            yield
        finally:
            free_after, reserved_after = self._read()
            own = max(0, reserved_after - reserved)
            self.size += own + min(DRIVER, max(0, free - free_after - own))

    def _read(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._device)[0], torch.cuda.memory_reserved(self._device)
