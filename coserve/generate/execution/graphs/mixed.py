"""Steps with prompts as CUDA graphs: any mix of decodes and chunks, padded to one of a few sizes.

Launched kernel by kernel such a step takes the host longer than the device, and its kernels have forms that follow from
its size, which Triton would compile in the middle of serving. A graph is one launch, and its forms are compiled when it
is captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass

from torch import Tensor

from coserve.generate.execution.graphs.decode import Captures, Copies, Inputs, Place, Results, serving, tokens_of
from coserve.generate.execution.slots import NO_ADAPTERS, AdapterSlots, Room, Scope, SlotLora, StaticLora, prompt_rooms
from coserve.generate.sampling.draws import likeliest
from coserve.generate.schedule import Share
from coserve.generate.sequences import Sequence
from coserve.kernels.attention.interface import MixedAttention, MixedCapacity, Run
from coserve.kernels.lora.segmented.plan import PREFILL_TILE_ROWS
from coserve.kernels.lora.segments import Segments
from coserve.kernels.sampling.sampling import NOT_FINITE
from coserve.memory.kv import KvCache
from coserve.model.fused import FusedBase

MIXED_BUCKETS = (32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048)
"""Tokens of steps with prompts that graphs are captured for. Up to some 256 rows reading the weights is what a step costs,
and padding is free; beyond, it costs what tokens cost, and sizes are closer. Steps of more tokens keep the device busy
for as long as the host needs to launch their kernels one by one."""
TOKENS_A_CHUNK, LEAST_CHUNKS = 16, 4
"""A graph has room for a prompt for each so many of its tokens: an idle tile of attention is a program, too."""

MISSES = 4
"""Steps that found no graph of their size, after which it is captured though there is work: each takes the host several
times as long as a launch, and may have Triton compile."""


def mixed_rooms(step_tokens: int, sequences: int, context: int) -> tuple[MixedCapacity, ...]:
    """What graphs hold that serve steps of up to `step_tokens` tokens, smallest first."""
    least = next((tokens for tokens in MIXED_BUCKETS if tokens >= step_tokens), MIXED_BUCKETS[-1])
    return tuple(
        MixedCapacity(
            tokens=tokens,
            sequences=min(tokens, sequences),
            chunks=min(tokens, sequences, max(LEAST_CHUNKS, tokens // TOKENS_A_CHUNK)),
            context=context,
        )
        for tokens in MIXED_BUCKETS
        if tokens <= least
    )


@dataclass(frozen=True)
class Rows:
    """What a packed step computes, row by row, and what is wanted of it."""

    tokens: list[int]
    """`NOT_FINITE` where only the device knows it: it is in the lane."""
    lanes: list[int]
    """0 where the token is known."""
    positions: list[int]
    keep: list[int]
    """Rows whose logits choose a token."""
    ready: tuple[Sequence, ...]
    """Whose tokens those are,"""
    to: list[int]
    """and their lanes."""


def rows_of(shares: Items[Share], lanes: dict[Sequence, int]) -> Rows:
    """`lanes`: of the sequences that have chosen a token, or choose one now."""
    found = Rows([], [], [], [], tuple(s.sequence for s in shares if s.tokens == s.sequence.pending), [])
    for share in shares:
        sequence, start, end = share.sequence, share.sequence.computed, share.sequence.computed + share.tokens
        found.positions.extend(range(start, end))
        found.tokens.extend(sequence.tokens[start:end])
        found.lanes.extend([0] * (len(found.tokens) - len(found.lanes)))
        if len(found.tokens) < len(found.positions):  # its last token is on the device only
            found.tokens.append(NOT_FINITE)
            found.lanes.append(lanes[sequence])
        if share.tokens == sequence.pending:
            found.keep.append(len(found.tokens) - 1)
            found.to.append(lanes[sequence])
    return found


class MixedGraph:
    """Steps of up to T tokens of any mix, padded. As `DecodeGraph`: `run` says which step, and runs what was captured."""

    def __init__(
        self,
        fused: FusedBase,
        attention: MixedAttention,
        last: Tensor,
        slots: AdapterSlots,
        scope: Scope,
        results: Results,
        place: Place | None,
    ) -> None:
        """As `DecodeGraph`."""
        self.capacity, device = attention.capacity, last.device
        tokens, sequences = self.capacity.tokens, self.capacity.sequences
        self._fused, self._attention, self._last, self._results = fused, attention, last, results
        rooms = prompt_rooms(tokens, sequences)
        decode = rooms[0].rows < PREFILL_TILE_ROWS
        self._lora = StaticLora(slots, tokens, scope, rooms, decode=decode) if scope.width else None
        self._inputs = Inputs((tokens, tokens, tokens, sequences, sequences), device)
        self._copies, self._captures = Copies(device), Captures(self._step, self._lora)
        self._attention.load(())
        if place is not None:
            self._captures.capture(place)

    def run(self, rows: Rows, runs: Items[Run], segments: Segments | None) -> tuple[Tensor, Tensor]:
        """Starts a step that the room holds: logits of the ready sequences, and the likeliest tokens, which are in their
        lanes already. `segments`: of slots; given if the graph has adapters."""
        assert (self._lora is None) == (segments is None), "expected adapters where the graph adds them"
        self._copies.wait()
        self._attention.load(runs)
        self._inputs.load(rows.tokens, rows.lanes, rows.positions, rows.keep, rows.to)
        room: Room | None = None
        if self._lora is not None and segments is not None:
            room = self._lora.load(segments)
        self._copies.under_way()
        logits, chosen = self._captures.replay(room)
        return logits[: len(rows.ready)], chosen[: len(rows.ready)]

    def _step(self, lora: SlotLora | None) -> tuple[Tensor, Tensor]:
        """Padding is token 0 at position 0, of which nothing is written; what is kept of it goes to nobody's lane."""
        given, lanes, positions, keep, to = self._inputs.columns
        tokens = tokens_of(given, self._last, lanes)
        logits = self._fused.forward(tokens, positions, self._attention, lora=lora, keep=keep)
        chosen = likeliest(logits)
        self._last.index_copy_(0, to, chosen.clamp_min(0))
        return self._results.keep(logits), chosen


class MixedGraphs:
    """The graphs of one base's steps with prompts, by room and by what their adapters change."""

    def __init__(
        self,
        fused: FusedBase,
        kv: KvCache,
        last: Tensor,
        slots: AdapterSlots,
        rooms: Items[MixedCapacity],
        results: Results,
        place: Place | None,
    ) -> None:
        """`last`, `slots`, `results`, `place`: as `DecodeGraph` has them. `rooms`: smallest first."""
        self._fused, self._kv, self._last, self._slots, self._place = fused, kv, last, slots, place
        self._rooms, self._results = tuple(rooms), results
        self._attention: dict[MixedCapacity, MixedAttention] = {}
        self._graphs: dict[tuple[MixedCapacity, Scope], MixedGraph] = {}
        self._missed: Counter[tuple[MixedCapacity, Scope]] = Counter()

    def prepare(self, scope: Scope) -> bool:
        """Captures the largest graph that is missing; False if none is. The others find its memory large enough."""
        room = next((room for room in reversed(self._rooms) if (room, scope) not in self._graphs), None)
        if room is not None:
            self._capture(room, scope)
        return room is not None

    def holding(self, runs: Items[Run], scope: Scope) -> MixedGraph | None:
        """The graph to run the step with; None: without one. No graph of more than the next size: padding has a price."""
        fit = [room for room in self._rooms if room.holds(runs)][:2]
        found = next((graph for room in fit if (graph := serving(self._graphs, room, scope)) is not None), None)
        if found is None and fit:
            self._missed[fit[0], scope] += 1
            if self._missed[fit[0], scope] >= MISSES:
                if not self._graphs:  # without adapters: fewer kernels to compile, and the same memory
                    self._capture(self._rooms[-1], NO_ADAPTERS)
                found = self._graphs.get((fit[0], scope)) or self._capture(fit[0], scope)
        return found

    def _capture(self, room: MixedCapacity, scope: Scope) -> MixedGraph:
        if room not in self._attention:
            self._attention[room] = self._kv.mixed_attention(room)
        own = self._attention[room], self._last, self._slots, scope, self._results, self._place
        self._graphs[room, scope] = MixedGraph(self._fused, *own)
        return self._graphs[room, scope]
