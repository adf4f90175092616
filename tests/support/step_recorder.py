"""Which steps with prompts a graph ran, and which ran as they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coserve.generate.execution.graphs.mixed import MixedGraph, Rows
from coserve.kernels.attention.expanded import StepTerms
from coserve.kernels.attention.interface import Attention, TokenRun
from coserve.memory.kv import KvCache


class StepRecorder:
    """Watches every executor as long as the test's `monkeypatch` lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs: list[tuple[int, int]] = []
        """Tokens of each step that a graph ran, and of that graph."""
        self.others = 0
        """Steps that no graph ran."""
        run, attention = MixedGraph.run, KvCache.attention

        def ran(graph: MixedGraph, rows: Rows, *args: object) -> object:
            self.graphs.append((len(rows.tokens), graph.capacity.tokens))
            return run(graph, rows, *args)  # type: ignore[arg-type]

        def launched(kv: KvCache, runs: Sequence[TokenRun], terms: StepTerms | None = None) -> Attention:
            self.others += 1
            return attention(kv, runs, terms)

        monkeypatch.setattr(MixedGraph, "run", ran)
        monkeypatch.setattr(KvCache, "attention", launched)
