"""Mixed steps as CUDA graphs: decodes and prompt chunks, padded to one of a few sizes.

Launched kernel by kernel, such a step takes the host longer than the device. Its kernels also have size-dependent
variants, which Triton would compile while serving. A graph is one launch, and its variants are compiled at capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from coserve.generate.execution.footprint import LoraFootprint
from coserve.generate.execution.graph_sizes import DECODE_KERNEL_TOKENS, mixed_tile_capacities
from coserve.generate.execution.graphs.graph_set import GraphSet
from coserve.generate.execution.graphs.shared import GraphState
from coserve.generate.execution.graphs.step_graph import StepGraph
from coserve.generate.execution.interface import SequenceInput
from coserve.generate.execution.slot_lora import StaticSlotLora
from coserve.generate.execution.token_slots import TokenSlots
from coserve.generate.sampling.draws import likeliest
from coserve.kernels.attention.interface import MixedAttention, MixedCapacity, TokenRun
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.sampling.constants import NOT_FINITE
from coserve.memory.kv import KvCache


@dataclass(frozen=True)
class Rows:
    """The rows of a packed step."""

    tokens: list[int]
    """Token ids; `NOT_FINITE` where the token is in a token slot."""
    slots: list[int]
    """Token slots; 0 where the token id is known."""
    positions: list[int]
    keep: list[int]
    """Rows whose logits sample a token."""
    to: list[int]
    """Token slots of the sequences that sample, for the rows `keep`."""


def rows_of(sequences: Iterable[SequenceInput], token_slots: TokenSlots) -> Rows:
    """The rows of the sequences one after another."""
    rows = Rows([], [], [], [], [])
    for own in sequences:
        slot = token_slots.slot(own.sequence)
        rows.positions.extend(range(own.run.position, own.run.position + own.run.tokens))
        rows.tokens.extend(own.tokens)
        rows.slots.extend([0] * len(own.tokens))
        if len(own.tokens) < own.run.tokens:  # its last token is on the device only
            rows.tokens.append(NOT_FINITE)
            rows.slots.append(slot)
        if own.sampling is not None:
            rows.keep.append(len(rows.tokens) - 1)
            rows.to.append(slot)
    return rows


class MixedGraph(StepGraph[MixedAttention]):
    """Steps of up to T tokens, padded; otherwise like `DecodeGraph`."""

    def __init__(
        self,
        state: GraphState,
        attention: MixedAttention,
        footprint: LoraFootprint,
        *,
        decode_kernel_tokens: int = DECODE_KERNEL_TOKENS,
    ) -> None:
        """`footprint`: covers the footprint of each step; `decode_kernel_tokens`: see `DECODE_KERNEL_TOKENS`."""
        self.capacity, lora = attention.capacity, None
        tokens, sequences = self.capacity.tokens, self.capacity.sequences
        if footprint.max_rank:
            tiles = mixed_tile_capacities(tokens, sequences, decode_kernel_tokens=decode_kernel_tokens)
            lora = StaticSlotLora(state.adapter_slots, tokens, footprint, tiles, state.remote)
        super().__init__(state, attention, lora, (tokens, tokens, tokens, sequences, sequences))

    def run(self, rows: Rows, runs: Sequence[TokenRun], segments: Segments | None) -> tuple[Tensor, Tensor]:
        """Launch a step that fits the capacity. Returns the same as `DecodeGraph.run`, for the rows `keep`.

        `segments`: with adapter slots; given if and only if the graph has adapters.
        """
        assert (self._lora is None) == (segments is None), "expected adapters where the graph adds them"
        logits, best = self._run(runs, segments, (rows.tokens, rows.slots, rows.positions, rows.keep, rows.to))
        return logits[: len(rows.to)], best[: len(rows.to)]

    def _step(self, lora: PreparedLora | None) -> tuple[Tensor, Tensor]:
        """The captured step. Padding is token 0 at position 0: its keys and values are not written, its samples go to
        slot 0."""
        given, slots, positions, keep, to = self._inputs.columns
        tokens = self._state.token_slots.fill(given, slots)
        logits = self._state.fused.forward(tokens, positions, self._attention, lora=lora, keep=keep)
        best = likeliest(logits)
        self._state.token_slots.store(to, best)
        return self._state.logits.keep(logits), best


class MixedGraphs(GraphSet[MixedCapacity, MixedGraph]):
    """A base's mixed graphs, by capacity and LoRA footprint."""

    def __init__(self, state: GraphState, kv: KvCache, capacities: Sequence[MixedCapacity]) -> None:
        """`capacities`: smallest first."""
        super().__init__(state.fused.base, capacities)
        self._state, self._kv = state, kv
        self._attention: dict[MixedCapacity, MixedAttention] = {}

    def _order(self) -> Iterable[MixedCapacity]:
        """Return the largest first, as all others fit its memory; then the smallest, as most steps are small."""
        return self._sizes if self._graphs else super()._order()

    def holding(self, runs: Sequence[TokenRun], footprint: LoraFootprint) -> MixedGraph | None:
        """Return the graph for the step, at most one size larger than needed because padding costs time; None: run the
        step without a graph."""
        needed = MixedCapacity.of(runs)
        fit = [capacity for capacity in self._sizes if capacity.covers(needed)][:2]
        return self._covering(fit, footprint)

    def _make(self, size: MixedCapacity, footprint: LoraFootprint) -> MixedGraph:
        if size not in self._attention:
            self._attention[size] = self._kv.mixed_attention(size)
        return MixedGraph(self._state, self._attention[size], footprint)
