"""The graphs of decode steps: which exist, which one runs a step."""

from __future__ import annotations

from coserve.generate.execution.footprint import LoraFootprint
from coserve.generate.execution.graphs.captured import covering_graph
from coserve.generate.execution.graphs.decode import DecodeGraph
from coserve.generate.execution.graphs.shared import GraphState
from coserve.memory.kv import KvCache


class DecodeGraphs:
    """The graphs of one base's decode steps, by batch and LoRA footprint."""

    def __init__(self, state: GraphState, kv: KvCache, batches: tuple[int, ...], max_tokens: int) -> None:
        """`batches`: smallest first; `max_tokens`: the longest context."""
        self._state, self._kv, self._batches, self._max_tokens = state, kv, batches, max_tokens
        self._graphs: dict[tuple[int, LoraFootprint], DecodeGraph] = {}

    @property
    def captured(self) -> tuple[tuple[int, LoraFootprint], ...]:
        """Batch and footprint of each graph, in the order of their capture."""
        return tuple(self._graphs)

    def prepare(self, footprint: LoraFootprint) -> bool:
        """Captures the largest missing graph; False if none is missing."""
        batch = next((size for size in reversed(self._batches) if (size, footprint) not in self._graphs), None)
        if batch is not None:
            self._capture(batch, footprint)
        return batch is not None

    def holding(self, sequences: int, footprint: LoraFootprint) -> DecodeGraph | None:
        """The graph that runs a step of so many sequences, captured if need be; None: they are too many."""
        batch = next((batch for batch in self._batches if batch >= sequences), None)
        if batch is None:
            return None
        return covering_graph(self._graphs, batch, footprint) or self._capture(batch, footprint)

    def _capture(self, batch: int, footprint: LoraFootprint) -> DecodeGraph:
        attention = self._kv.static_attention(batch, self._max_tokens)
        graph = self._graphs[batch, footprint] = DecodeGraph(self._state, attention, footprint)
        return graph
