"""Mixed steps as CUDA graphs: decodes and prompt chunks, padded to one of a few sizes.

Launched kernel by kernel, such a step takes the host longer than the device. Its kernels also have size-dependent
variants, which Triton would compile while serving. A graph is one launch, and its variants are compiled at capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from coserve.generate.execution.footprint import LoraFootprint
from coserve.generate.execution.graph_sizes import DECODE_KERNEL_TOKENS, TileCapacity, mixed_tile_capacities
from coserve.generate.execution.graphs.captured import CapturedStep
from coserve.generate.execution.graphs.shared import GraphState, InputBuffer, InputCopies
from coserve.generate.execution.interface import SequenceInput
from coserve.generate.execution.slot_lora import StaticSlotLora
from coserve.generate.execution.token_slots import TokenSlots
from coserve.generate.sampling.draws import likeliest
from coserve.kernels.attention.interface import MixedAttention, TokenRun
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.segmented.plan import PREFILL_TILE_ROWS
from coserve.kernels.lora.segments import Segments
from coserve.kernels.sampling.constants import NOT_FINITE


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


class MixedGraph:
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
        self.capacity, device = attention.capacity, state.token_slots.tokens.device
        tokens, sequences = self.capacity.tokens, self.capacity.sequences
        self._state, self._attention = state, attention
        self._lora: StaticSlotLora | None = None
        if footprint.max_rank:
            tiles = mixed_tile_capacities(tokens, sequences, decode_kernel_tokens=decode_kernel_tokens)
            decode = tiles[0].rows < PREFILL_TILE_ROWS
            self._lora = StaticSlotLora(state.adapter_slots, tokens, footprint, tiles, decode=decode)
        self._inputs = InputBuffer((tokens, tokens, tokens, sequences, sequences), device)
        self._copies, self._captured = InputCopies(device), CapturedStep(self._step, self._lora)
        self._attention.load(())

    def capture(self) -> Iterator[None]:
        """Capture in pieces. Exhaust it before the first `run`; steps of other graphs may run between pieces."""
        if self._state.pool is not None:
            yield from self._captured.capture(self._state.pool, lambda: self._attention.load(()))

    def run(self, rows: Rows, runs: Sequence[TokenRun], segments: Segments | None) -> tuple[Tensor, Tensor]:
        """Launch a step that fits the capacity. Returns the same as `DecodeGraph.run`, for the rows `keep`.

        `segments`: with adapter slots; given if and only if the graph has adapters.
        """
        assert (self._lora is None) == (segments is None), "expected adapters where the graph adds them"
        self._copies.wait()
        self._attention.load(runs)
        self._inputs.load(rows.tokens, rows.slots, rows.positions, rows.keep, rows.to)
        tiles: TileCapacity | None = None
        if self._lora is not None and segments is not None:
            tiles = self._lora.load(segments)
        self._copies.record()
        logits, best = self._captured.replay(tiles)
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
