"""All decode graphs: their captures, and the choice of the graph that runs a step."""

from __future__ import annotations

from collections.abc import Iterator

from coserve.generate.execution.footprint import LoraFootprint
from coserve.generate.execution.graphs.captured import covering_graph
from coserve.generate.execution.graphs.decode import DecodeGraph
from coserve.generate.execution.graphs.left_out import LeftOut
from coserve.generate.execution.graphs.shared import GraphState
from coserve.memory.kv import KvCache


class DecodeGraphs:
    """A base's decode graphs, by batch size and LoRA footprint."""

    def __init__(self, state: GraphState, kv: KvCache, batches: tuple[int, ...], max_tokens: int) -> None:
        """`batches`: smallest first; `max_tokens`: longest context."""
        self._state, self._kv, self._batches, self._max_tokens = state, kv, batches, max_tokens
        self._graphs: dict[tuple[int, LoraFootprint], DecodeGraph] = {}
        self.left_out = LeftOut(state.fused.base.device, tolerated=state.fused.base.sharding is None)

    @property
    def captured(self) -> tuple[tuple[int, LoraFootprint], ...]:
        """Batch size and footprint of each graph, in order of capture."""
        return tuple(self._graphs)

    def missing(self, footprint: LoraFootprint) -> int:
        """Number of graphs of this footprint still to be captured."""
        return sum(self._is_missing(batch, footprint) for batch in self._batches)

    def _is_missing(self, batch: int, footprint: LoraFootprint) -> bool:
        return (batch, footprint) not in self._graphs and (batch, footprint) not in self.left_out

    def any(self, footprint: LoraFootprint) -> bool:
        """Whether a graph of this footprint was captured, or its capture failed."""
        return any(not self._is_missing(batch, footprint) for batch in self._batches)

    def prepare(self, footprint: LoraFootprint) -> Iterator[None] | None:
        """Return the capture, in pieces, of the largest missing graph; None if none is missing."""
        batch = next((size for size in reversed(self._batches) if self._is_missing(size, footprint)), None)
        return None if batch is None else self._capture(batch, footprint)

    def holding(self, sequences: int, footprint: LoraFootprint, *, capture: bool = True) -> DecodeGraph | None:
        """Return the graph for a step of `sequences` sequences; None: none is large enough, or none can be captured.

        `capture`: capture the graph of the next size if it is missing; otherwise a larger one serves until then.
        """
        fit = [batch for batch in self._batches if batch >= sequences]
        if capture and fit and covering_graph(self._graphs, fit[0], footprint) is None:
            self._capture_at_once(fit[0], footprint)
        found = (covering_graph(self._graphs, batch, footprint) for batch in fit)
        return next((graph for graph in found if graph is not None), None)

    def _capture_at_once(self, batch: int, footprint: LoraFootprint) -> None:
        if self._is_missing(batch, footprint):
            for _ in self._capture(batch, footprint):
                pass

    def _capture(self, batch: int, footprint: LoraFootprint) -> Iterator[None]:
        with self.left_out.capturing((batch, footprint)):
            graph = DecodeGraph(self._state, self._kv.static_attention(batch, self._max_tokens), footprint)
            yield from graph.capture()
            self._graphs[batch, footprint] = graph
