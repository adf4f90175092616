"""Decode steps as CUDA graphs: one launch a step, however many kernels the model has."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from coserve.generate.execution.footprint import LoraFootprint
from coserve.generate.execution.graph_sizes import decode_tile_capacities
from coserve.generate.execution.graphs.graph_set import GraphSet
from coserve.generate.execution.graphs.shared import GraphState
from coserve.generate.execution.graphs.step_graph import StepGraph
from coserve.generate.execution.slot_lora import StaticSlotLora
from coserve.generate.sampling.draws import likeliest
from coserve.kernels.attention.interface import StaticPagedAttention, TokenRun
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.segments import Segments
from coserve.memory.kv import KvCache


class DecodeGraph(StepGraph[StaticPagedAttention]):
    """Steps of up to B sequences with one token each."""

    def __init__(self, state: GraphState, attention: StaticPagedAttention, footprint: LoraFootprint) -> None:
        """`footprint`: covers the footprint of each step."""
        batch, lora = attention.batch, None
        if footprint.max_rank:
            capacities = decode_tile_capacities(batch)
            lora = StaticSlotLora(state.adapter_slots, batch, footprint, capacities, state.remote)
        super().__init__(state, attention, lora, (batch, batch))

    def run(
        self, runs: Sequence[TokenRun], slots: Sequence[int], tokens: Sequence[int], segments: Segments | None
    ) -> tuple[Tensor, Tensor]:
        """Launch a step. `slots`: the sequences' token slots; `tokens`: their newest tokens, negative if the token is
        in the slot; `segments`: with adapter slots.

        Returns logits (N, V) and the most likely tokens (N), already stored in the token slots; `NOT_FINITE` for none.
        The next run of any graph overwrites both.
        """
        logits, best = self._run(runs, segments, (slots, tokens))
        return logits[: len(runs)], best[: len(runs)]

    def _step(self, lora: PreparedLora | None) -> tuple[Tensor, Tensor]:
        slots, given = self._inputs.columns
        tokens, positions = self._state.token_slots.fill(given, slots), self._attention.positions
        logits = self._state.fused.forward(tokens, positions, self._attention, lora=lora, keep=None)
        best = likeliest(logits)
        self._state.token_slots.store(slots, best)
        return self._state.logits.keep(logits), best


class DecodeGraphs(GraphSet[int, DecodeGraph]):
    """A base's decode graphs, by batch size and LoRA footprint."""

    def __init__(self, state: GraphState, kv: KvCache, batches: tuple[int, ...], max_tokens: int) -> None:
        """`batches`: smallest first; `max_tokens`: longest context."""
        super().__init__(state.fused.base, batches)
        self._state, self._kv, self._max_tokens = state, kv, max_tokens

    def holding(self, sequences: int, footprint: LoraFootprint) -> DecodeGraph | None:
        """Return the smallest captured graph for a step of `sequences` sequences; None: run the step without a
        graph."""
        return self._covering((batch for batch in self._sizes if batch >= sequences), footprint)

    def _make(self, size: int, footprint: LoraFootprint) -> DecodeGraph:
        return DecodeGraph(self._state, self._kv.static_attention(size, self._max_tokens), footprint)
