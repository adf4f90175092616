"""Decode steps as CUDA graphs: one launch a step, however many kernels the model has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from coserve.generate.execution.footprint import LoraFootprint
from coserve.generate.execution.graph_sizes import TileCapacity, decode_tile_capacities
from coserve.generate.execution.graphs.captured import CapturedStep
from coserve.generate.execution.graphs.shared import GraphState, InputBuffer, InputCopies
from coserve.generate.execution.slot_lora import StaticSlotLora
from coserve.generate.sampling.draws import likeliest
from coserve.kernels.attention.interface import StaticPagedAttention, TokenRun
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.segments import Segments


class DecodeGraph:
    """Steps of up to B sequences with one token each.

    With adapters there is a graph for each capacity of LoRA tiles, all over the same buffers.
    """

    def __init__(self, state: GraphState, attention: StaticPagedAttention, footprint: LoraFootprint) -> None:
        """`footprint`: covers the footprint of each step."""
        batch, device = attention.batch, state.token_slots.tokens.device
        self._state, self._attention = state, attention
        self._lora: StaticSlotLora | None = None
        if footprint.max_rank:
            capacities = decode_tile_capacities(batch)
            self._lora = StaticSlotLora(state.adapter_slots, batch, footprint, capacities, decode=True)
        self._inputs, self._copies = InputBuffer((batch, batch), device), InputCopies(device)
        self._captured = CapturedStep(self._step, self._lora)
        self._attention.load(())

    def capture(self) -> Iterator[None]:
        """Capture in pieces. Exhaust it before the first `run`; steps of other graphs may run between pieces."""
        if self._state.pool is not None:
            yield from self._captured.capture(self._state.pool, lambda: self._attention.load(()))

    def run(
        self, runs: Sequence[TokenRun], slots: Sequence[int], tokens: Sequence[int], segments: Segments | None
    ) -> tuple[Tensor, Tensor]:
        """Launch a step. `slots`: the sequences' token slots; `tokens`: their newest tokens, negative if the token is
        in the slot; `segments`: with adapter slots.

        Returns logits (N, V) and the most likely tokens (N), already stored in the token slots; `NOT_FINITE` for none.
        The next run of any graph overwrites both.
        """
        self._copies.wait()
        self._attention.load(runs)
        self._inputs.load(slots, tokens)
        capacity: TileCapacity | None = None
        if self._lora is not None:
            assert segments is not None, "expected adapters where the graph adds them"
            capacity = self._lora.load(segments)
        self._copies.record()
        logits, best = self._captured.replay(capacity)
        return logits[: len(runs)], best[: len(runs)]

    def _step(self, lora: PreparedLora | None) -> tuple[Tensor, Tensor]:
        slots, given = self._inputs.columns
        tokens, positions = self._state.token_slots.fill(given, slots), self._attention.positions
        logits = self._state.fused.forward(tokens, positions, self._attention, lora=lora, keep=None)
        best = likeliest(logits)
        self._state.token_slots.store(slots, best)
        return self._state.logits.keep(logits), best
