"""One decode step as one CUDA graph: a launch, whatever the model's number of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.generate.draws import likeliest
from coserve.generate.slots import AdapterSlots, Room, SlotLora, StaticLora
from coserve.kernels.attention_static import StaticPagedAttention
from coserve.kernels.segments import Segments
from coserve.kernels.tiles import Run
from coserve.model.fused import FusedBase

WARM_UPS = 2
"""Runs ahead of the capture: kernels are compiled, buffers made."""


@dataclass(frozen=True)
class Captured:
    """One graph, and where its results lie."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    chosen: Tensor


class DecodeGraph:
    """Steps of up to B sequences, one token each. `load` says which; `replay` runs what was captured.

    With adapters there is a graph for each of several ways to cut a step (`StaticLora.rooms`), all over the same buffers.
    """

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
        self._room: Room | None = None
        self._captured: dict[Room | None, Captured] = {}
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
            self._room = self._lora.load(segments)
        assert self._lora is None or self._room is not None, "expected the adapters of the first step"
        if self._copied is not None:
            self._copied.record()

    def replay(self) -> None:
        captured = self._captured.get(self._room)
        if captured is None:
            self.logits, self.chosen = self._step(self._terms(self._room))
        else:
            captured.graph.replay()
            self.logits, self.chosen = captured.logits, captured.chosen

    def _terms(self, room: Room | None) -> SlotLora | None:
        return None if self._lora is None or room is None else self._lora.within(room)

    def _step(self, lora: SlotLora | None) -> tuple[Tensor, Tensor]:
        lanes, given = self._inputs
        tokens = torch.where(given < 0, self._last.index_select(0, lanes), given)
        positions = self._attention.positions
        logits = self._fused.forward(tokens, positions, self._attention, lora=lora, keep=None)
        chosen = likeliest(logits)
        self._last.index_copy_(0, lanes, chosen.clamp_min(0))
        return logits, chosen

    def _capture(self, memory: tuple[int, int] | None) -> None:
        rooms: tuple[Room | None, ...] = (None,) if self._lora is None else self._lora.rooms
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._step(self._terms(rooms[0]))
        torch.cuda.current_stream().wait_stream(side)
        for room in rooms:
            graph, lora = torch.cuda.CUDAGraph(), self._terms(room)
            with torch.cuda.graph(graph, pool=memory):  # type: ignore[arg-type]  # an opaque handle
                results = self._step(lora)
            self._captured[room] = Captured(graph, *results)
