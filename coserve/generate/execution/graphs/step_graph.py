"""A step over fixed buffers, captured as CUDA graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from coserve.generate.execution.graph_sizes import TileCapacity
from coserve.generate.execution.graphs.shared import GraphState, InputBuffer
from coserve.generate.execution.slot_lora import StaticSlotLora
from coserve.kernels.attention.interface import MixedAttention, StaticPagedAttention, TokenRun
from coserve.kernels.gpu.capture import captured
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.segments import Segments

WARM_UPS = 1
"""Runs before a capture: they compile kernels and allocate buffers."""

AnyAttention = TypeVar("AnyAttention", StaticPagedAttention, MixedAttention)


class _Captured(NamedTuple):
    """One graph, and its output tensors."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    likeliest: Tensor


class StepGraph(ABC, Generic[AnyAttention]):
    """A step, captured once for each capacity of LoRA tiles, all over the same buffers. On CPU nothing is captured: the
    step runs as it is."""

    def __init__(
        self, state: GraphState, attention: AnyAttention, lora: StaticSlotLora | None, columns: Sequence[int]
    ) -> None:
        """`lora`: None: the step adds no adapters' terms; `columns`: sizes of its columns of inputs."""
        device = state.token_slots.tokens.device
        self._state, self._lora = state, lora
        self._attention: AnyAttention = attention
        self._inputs = InputBuffer(columns, device)
        self._captured: dict[TileCapacity | None, _Captured] = {}
        attention.load(())

    @abstractmethod
    def _step(self, lora: PreparedLora | None) -> tuple[Tensor, Tensor]:
        """Launch the step over the buffers with these LoRA terms; return logits and most likely tokens."""

    def capture(self) -> Iterator[None]:
        """Capture in pieces, one for each warm-up run and each graph. Exhaust it before the first run; steps of other
        graphs may run between pieces."""
        if (pool := self._state.pool) is None:
            return
        capacities: tuple[TileCapacity | None, ...] = (None,) if self._lora is None else self._lora.capacities
        for _ in range(WARM_UPS):
            self._attention.load(())  # so that the run writes no keys or values
            pool.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(pool.stream):
                self._step(self._terms(capacities[0]))
            torch.cuda.current_stream().wait_stream(pool.stream)
            yield
        for capacity in capacities:
            graph, lora = torch.cuda.CUDAGraph(), self._terms(capacity)
            with captured(graph, pool.memory, pool.stream):
                results = self._step(lora)
            self._captured[capacity] = _Captured(graph, *results)
            yield

    def _run(
        self, runs: Sequence[TokenRun], segments: Segments | None, columns: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """Load the inputs and launch the step. `segments`: with adapter slots. Returns logits and most likely tokens;
        the next run of any graph overwrites both."""
        self._inputs.wait()
        self._attention.load(runs)
        self._inputs.load(*columns)
        capacity: TileCapacity | None = None
        if self._lora is not None:
            assert segments is not None, "expected adapters where the graph adds them"
            capacity = self._lora.load(segments)
        self._inputs.record()
        if self._lora is not None and segments is not None:
            self._lora.begin(segments)
        found = self._captured.get(capacity)
        if found is None:
            results = self._step(self._terms(capacity))
        else:
            found.graph.replay()
            results = found.logits, found.likeliest
        if self._lora is not None:
            self._lora.launched()
        return results

    def _terms(self, capacity: TileCapacity | None) -> PreparedLora | None:
        return None if self._lora is None or capacity is None else self._lora.within(capacity)
