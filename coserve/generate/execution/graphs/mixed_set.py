"""All mixed graphs: their captures, and the choice of the graph that runs a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from coserve.generate.execution.footprint import NO_ADAPTERS, LoraFootprint
from coserve.generate.execution.graph_sizes import CAPTURE_AFTER
from coserve.generate.execution.graphs.captured import covering_graph
from coserve.generate.execution.graphs.left_out import LeftOut
from coserve.generate.execution.graphs.mixed import MixedGraph
from coserve.generate.execution.graphs.shared import GraphState
from coserve.kernels.attention.interface import MixedAttention, MixedCapacity, TokenRun
from coserve.memory.kv import KvCache


class MixedGraphs:
    """A base's mixed graphs, by capacity and LoRA footprint."""

    def __init__(
        self,
        state: GraphState,
        kv: KvCache,
        capacities: Sequence[MixedCapacity],
        *,
        capture_after: int | None = CAPTURE_AFTER,
    ) -> None:
        """`capacities`: smallest first; `capture_after`: see `CAPTURE_AFTER`; None: never during a step."""
        self._state, self._kv, self._capture_after = state, kv, capture_after
        self._capacities = tuple(capacities)
        self._attention: dict[MixedCapacity, MixedAttention] = {}
        self._graphs: dict[tuple[MixedCapacity, LoraFootprint], MixedGraph] = {}
        self.left_out = LeftOut(state.fused.base.device, tolerated=state.fused.base.sharding is None)
        self._missed: Counter[tuple[MixedCapacity, LoraFootprint]] = Counter()

    def missing(self, footprint: LoraFootprint) -> int:
        """Number of graphs of this footprint still to be captured."""
        return sum(self._is_missing(size, footprint) for size in self._capacities)

    def _is_missing(self, capacity: MixedCapacity, footprint: LoraFootprint) -> bool:
        return (capacity, footprint) not in self._graphs and (capacity, footprint) not in self.left_out

    def prepare(self, footprint: LoraFootprint) -> Iterator[None] | None:
        """Return the capture, in pieces, of a missing graph; None if none is missing. The largest comes first, as all
        others fit its memory; then the smallest, as most steps are small."""
        order = self._capacities if self._graphs else reversed(self._capacities)
        capacity = next((size for size in order if self._is_missing(size, footprint)), None)
        return None if capacity is None else self._capture(capacity, footprint)

    def holding(self, runs: Sequence[TokenRun], footprint: LoraFootprint) -> MixedGraph | None:
        """Return the graph for the step, at most one size larger than needed because padding costs time; None: run the
        step without a graph."""
        fit = [capacity for capacity in self._capacities if capacity.holds(runs)][:2]
        graphs = (covering_graph(self._graphs, capacity, footprint) for capacity in fit)
        found = next((graph for graph in graphs if graph is not None), None)
        if found is None and fit and self._capture_after is not None:
            self._missed[fit[0], footprint] += 1
            if self._missed[fit[0], footprint] >= self._capture_after:
                if not self._graphs:  # largest first, for its memory; without adapters: fewer kernels
                    self._capture_at_once(self._capacities[-1], NO_ADAPTERS)
                found = self._graphs.get((fit[0], footprint)) or self._capture_at_once(fit[0], footprint)
        return found

    def _capture_at_once(self, capacity: MixedCapacity, footprint: LoraFootprint) -> MixedGraph | None:
        """Capture a graph and return it; None if there is, or was, too little memory."""
        if self._is_missing(capacity, footprint):
            for _ in self._capture(capacity, footprint):
                pass
        return self._graphs.get((capacity, footprint))

    def _capture(self, capacity: MixedCapacity, footprint: LoraFootprint) -> Iterator[None]:
        with self.left_out.capturing((capacity, footprint)):
            if capacity not in self._attention:
                self._attention[capacity] = self._kv.mixed_attention(capacity)
            graph = MixedGraph(self._state, self._attention[capacity], footprint)
            yield from graph.capture()
            self._graphs[capacity, footprint] = graph
