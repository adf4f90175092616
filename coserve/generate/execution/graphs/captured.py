"""A step captured as CUDA graphs, and the choice between graphs of several LoRA footprints."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from coserve.generate.execution.footprint import LoraFootprint
from coserve.generate.execution.graph_sizes import TileCapacity
from coserve.generate.execution.graphs.shared import GraphPool
from coserve.generate.execution.slot_lora import StaticSlotLora
from coserve.kernels.gpu.capture import captured
from coserve.kernels.lora.interface import PreparedLora

Size = TypeVar("Size", bound=Hashable)
Graph = TypeVar("Graph")

WARM_UPS = 1
"""Runs before a capture: they compile kernels and allocate buffers."""


@dataclass(frozen=True)
class _Captured:
    """One graph, and its output tensors."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    likeliest: Tensor


class CapturedStep:
    """A step over fixed buffers, captured once for each capacity of LoRA tiles.

    On CPU nothing is captured: `replay` runs the step.
    """

    def __init__(
        self, step: Callable[[PreparedLora | None], tuple[Tensor, Tensor]], lora: StaticSlotLora | None
    ) -> None:
        """`step`: launches the step with the given LoRA terms; returns logits and most likely tokens."""
        self._step, self._lora = step, lora
        self._captured: dict[TileCapacity | None, _Captured] = {}

    def capture(self, pool: GraphPool, unload: Callable[[], None]) -> Iterator[None]:
        """Capture in pieces, one for each warm-up run and each graph. Other steps may run between pieces.

        `unload`: clears the inputs that other graphs share, so that a warm-up run writes no keys or values.
        """
        capacities: tuple[TileCapacity | None, ...] = (None,) if self._lora is None else self._lora.capacities
        for _ in range(WARM_UPS):
            unload()
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

    def replay(self, capacity: TileCapacity | None) -> tuple[Tensor, Tensor]:
        """Run the step; return logits and most likely tokens. The next replay overwrites both."""
        captured = self._captured.get(capacity)
        if captured is None:
            return self._step(self._terms(capacity))
        captured.graph.replay()
        return captured.logits, captured.likeliest

    def _terms(self, capacity: TileCapacity | None) -> PreparedLora | None:
        return None if self._lora is None or capacity is None else self._lora.within(capacity)


def covering_graph(
    graphs: Mapping[tuple[Size, LoraFootprint], Graph], size: Size, footprint: LoraFootprint
) -> Graph | None:
    """Return the graph of `size` that covers the footprint with the least extra work; None if there is none."""
    found = graphs.get((size, footprint))
    if found is not None or not footprint.max_rank:
        return found
    wider = [other for own, other in graphs if own == size and other.covers(footprint)]
    least = min(
        wider, key=lambda one: (one.max_rank, len(one.groups), one.local + one.sharded + one.scaled), default=None
    )
    return None if least is None else graphs[size, least]
