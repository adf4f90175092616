"""Copies adapters from the host into pages."""

from __future__ import annotations

import torch

from coserve.lora.store.packing import copied_into
from coserve.memory.buffer import PageBuffer
from coserve.memory.pages import Span
from coserve.model.lora import LoraWeights


class PageCopies:
    """On a GPU, copies run on a stream of their own. One into pages that the step in flight does not use runs beside
    that step; any other begins when it has ended. The next step begins when all copies have ended, so whoever launches
    it waits for nothing on the host.

    Steps wait for whole adapters, not layer by layer: compiled steps are CUDA graphs, which begin as a whole.
    """

    def __init__(self, buffer: PageBuffer) -> None:
        self._buffer, self._device = buffer, buffer.device
        on_gpu = self._device.type == "cuda"
        self.stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        """The copies run on it; None on a CPU."""

    def copy(self, weights: LoraWeights, span: Span) -> LoraWeights:
        """Copy an adapter into a span that was just allocated; return its views there."""
        if self.stream is None:
            return copied_into(self._buffer.of(span), weights)
        steps = torch.cuda.current_stream(self._device)
        if not self._buffer.is_quiet(span):
            self.stream.wait_stream(steps)
        with torch.cuda.stream(self.stream):
            copy = copied_into(self._buffer.of(span), weights)
        steps.wait_stream(self.stream)
        return copy
