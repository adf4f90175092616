"""One decode step as one CUDA graph: a launch, whatever the model's number of kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.generate.sampler import likeliest
from coserve.generate.slots import AdapterSlots, StaticLora
from coserve.kernels.attention_static import StaticPagedAttention
from coserve.kernels.segments import Segments
from coserve.kernels.tiles import Run
from coserve.model.fused import FusedBase

WARM_UPS = 2
"""Runs ahead of the capture: kernels are compiled, buffers made."""


class DecodeGraph:
    """Steps of up to B sequences, one token each. `load` says which; `replay` runs what was captured."""

    logits: Tensor
    """(B, V), of the last replay."""
    chosen: Tensor
    """int64 (B), device: the likeliest tokens, `NOT_FINITE` for none; they are in their lanes already."""

    def __init__(
        self,
        fused: FusedBase,
        attention: StaticPagedAttention,
        last: Tensor,
        slots: AdapterSlots | None,
        R: int,
        memory: tuple[int, int] | None,
    ) -> None:
        """`last`: every lane's newest token. `slots`: None for steps without adapters. `R`: the largest rank to serve.

        On CPU nothing is captured: `replay` runs the step.
        """
        batch, device = attention.batch, last.device
        self._fused, self._attention, self._last = fused, attention, last
        self._lora = None if slots is None else StaticLora(slots, batch, R)
        self._inputs = torch.zeros(2, batch, dtype=torch.int64, device=device)
        self._host = torch.zeros(2, batch, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._loaded: tuple[list[int], list[int]] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._attention.load(())
        if device.type == "cuda":
            self._capture(memory)

    def load(self, runs: Sequence[Run], lanes: Sequence[int], tokens: Sequence[int], segments: Segments | None) -> None:
        """The next step: the sequences' runs, lanes, and newest tokens (negative: the one in the lane)."""
        if self._copied is not None:
            self._copied.synchronize()  # of the step before: long done when the next one is made
        self._attention.load(runs)
        wanted = (list(lanes), list(tokens))
        if wanted != self._loaded:
            self._host.zero_()
            self._host[0, : len(lanes)] = torch.tensor(lanes)
            self._host[1, : len(lanes)] = torch.tensor(tokens)
            self._inputs.copy_(self._host, non_blocking=True)
            self._loaded = wanted
        if self._lora is not None and segments is not None:
            self._lora.load(segments)
        if self._copied is not None:
            self._copied.record()

    def replay(self) -> None:
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def _step(self) -> None:
        lanes, given = self._inputs
        tokens = torch.where(given < 0, self._last.index_select(0, lanes), given)
        positions = self._attention.positions
        self.logits = self._fused.forward(tokens, positions, self._attention, lora=self._lora, keep=None)
        self.chosen = likeliest(self.logits)
        self._last.index_copy_(0, lanes, self.chosen.clamp_min(0))

    def _capture(self, memory: tuple[int, int] | None) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory):  # type: ignore[arg-type]  # an opaque handle
            self._step()
