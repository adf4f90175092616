"""Steps at full speed on a GPU: nothing waits for the device but the reading of tokens, one step later.

A sampled token goes on the device straight into its sequence's token slot, where the next step reads it, and to the host in
the background. So step n + 1 is planned, packed and launched while step n runs,
before anybody knows n's tokens. A step runs as one CUDA graph, if there is one that holds it, else kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.generate.batch import by_adapter
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.footprint import NO_ADAPTERS, LoraFootprint
from coserve.generate.execution.graph_sizes import (
    CAPTURE_AFTER,
    MIXED_TOKENS,
    PARTIAL_FOOTPRINTS,
    decode_batches,
    graph_rank,
    mixed_capacities,
)
from coserve.generate.execution.graphs.captured import covering_graph
from coserve.generate.execution.graphs.decode import DecodeGraph
from coserve.generate.execution.graphs.mixed import Rows, rows_of
from coserve.generate.execution.graphs.mixed_set import MixedGraphs
from coserve.generate.execution.graphs.shared import GraphState, LogitsBuffer, make_graph_pool
from coserve.generate.execution.slot_lora import slot_lora
from coserve.generate.execution.token_slots import TokenSlots
from coserve.generate.sampling.device_sampler import DeviceSampler
from coserve.generate.sampling.draws import likeliest
from coserve.generate.sampling.sampler import Choice, Chosen, NoToken, choices, send_ids
from coserve.generate.schedule import Share
from coserve.generate.sequences import Sequence
from coserve.kernels.attention.interface import Run
from coserve.kernels.lora.segments import Segments
from coserve.kernels.sampling.constants import NOT_FINITE
from coserve.memory.kv import KvCache
from coserve.model.fused import FusedBase


@dataclass(frozen=True)
class Flight:
    """A step under way."""

    ready: tuple[Sequence, ...]
    """Sequences whose next token it chooses."""
    host: Chosen
    done: torch.cuda.Event | None
    """After the copy of the tokens to `host`."""

    def land(self) -> list[Choice | NoToken]:
        """Waits for the step's tokens."""
        if self.done is not None:
            self.done.synchronize()
        return choices(self.host)


@dataclass(frozen=True)
class Packed:
    """Shares in the order of their adapters, and where their segments lie."""

    shares: list[Share]
    segments: Segments | None
    """`adapters` are slots; None: no adapter in the batch."""
    runs: list[Run]


class Runner:
    """Launches steps of one base on the current stream. Not for two threads at once."""

    def __init__(
        self,
        fused: FusedBase,
        kv: KvCache,
        *,
        max_running: int,
        slots: int | None = None,
        step_tokens: int = MIXED_TOKENS[-1],
        capture_after: int = CAPTURE_AFTER,
    ) -> None:
        """`slots`: adapters that steps find on the device at once, at least `max_running`. `step_tokens`: most tokens of a
        step that graphs are captured for. `capture_after`: see `CAPTURE_AFTER`."""
        base = fused.base
        self._fused, self._kv, self._device = fused, kv, base.device
        self._max_tokens = min(base.spec.context, kv.tokens)
        self._sampler, self._sampler_warm = DeviceSampler(base.spec.vocab, base.device), False
        self._adapter_slots = AdapterSlots(fused.groups, max(slots or 0, max_running), base.device)
        self._token_slots = TokenSlots(base.device)
        self._batches = decode_batches(max_running)
        self._footprints: dict[LoraFootprint, None] = {NO_ADAPTERS: None}
        """Of the steps so far, and those that were asked for."""
        self._decode_graphs: dict[tuple[int, LoraFootprint], DecodeGraph] = {}
        logits, pool = LogitsBuffer(self._batches[-1]), make_graph_pool(base.device)
        self._state = GraphState(fused, self._token_slots, self._adapter_slots, logits, pool)
        capacities = mixed_capacities(step_tokens, self._batches[-1], self._max_tokens)
        self._mixed_graphs = MixedGraphs(self._state, kv, capacities, capture_after=capture_after)

    @property
    def decode_graphs(self) -> tuple[tuple[int, LoraFootprint], ...]:
        """Batch and footprint of each decode graph, in the order of their capture."""
        return tuple(self._decode_graphs)

    def warm_up(self, ranks: Items[int] = (16,)) -> None:
        """Captures the graphs of steps without adapters, and of steps whose adapters are of these ranks, at any sites."""
        while self.prepare(ranks):
            pass

    def prepare(self, ranks: Items[int] = (16,)) -> bool:
        """One part of `warm_up`, also for the footprints of steps so far: the sampler's kernels, or the graphs of one size.

        False if nothing was left to do.
        """
        if not self._sampler_warm:
            self._sampler.warm_up(self._fused.base.dtype)
            self._sampler_warm = True
            return True
        for rank in ranks:
            if (size := graph_rank(rank)) is not None:
                self._footprints[LoraFootprint(size, self._adapter_slots.all_groups)] = None
        for footprint in self._footprints:
            if self._mixed_graphs.prepare(footprint):
                return True
            missing = (size for size in reversed(self._batches) if (size, footprint) not in self._decode_graphs)
            batch = next(missing, None)
            if batch is not None:
                self._capture_decode(batch, footprint)
                return True
        return False

    def launch(self, shares: Items[Share]) -> Flight:
        """Start a step. What `computed` says of its sequences is from before it."""
        packed = self._pack(shares)
        ready = tuple(s.sequence for s in packed.shares if s.tokens == s.sequence.pending)
        footprint = NO_ADAPTERS if packed.segments is None else self._footprint(packed.segments)
        decode = len(ready) == len(packed.shares) and all(s.tokens == 1 for s in packed.shares)
        if decode and footprint is not None and len(ready) <= self._batches[-1]:
            chosen = self._decode(packed, ready, footprint)
        else:
            chosen = self._mixed(packed, ready, footprint)
        host = chosen.fetch()
        done = torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if done is not None:
            done.record()
        return Flight(ready, host, done)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._sampler.forget(sequence)
        self._token_slots.free(sequence)

    def _pack(self, shares: Items[Share]) -> Packed:
        groups = by_adapter(shares)
        adapted = [group for adapter, group in groups.items() if adapter is not None]
        slots = self._adapter_slots.place([w for group in adapted if (w := group[0].sequence.weights) is not None])
        ordered = [share for group in groups.values() for share in group]
        runs = [Run(s.tokens, s.sequence.computed, tuple(s.sequence.pages)) for s in ordered]
        if not adapted:
            return Packed(ordered, None, runs)
        bounds = [0]
        for group in groups.values():
            bounds.append(bounds[-1] + sum(share.tokens for share in group))
        return Packed(ordered, Segments(tuple(bounds), (*slots, *[-1] * (len(groups) - len(slots)))), runs)

    def _footprint(self, segments: Segments) -> LoraFootprint | None:
        """That of the graphs for the step, to be prepared from now on; None: its ranks are too large for any."""
        exact = self._adapter_slots.footprint(segments)
        rank, groups = graph_rank(exact.max_rank), self._adapter_slots.all_groups
        if rank is None:
            return None
        found = LoraFootprint(rank, exact.groups)
        partial = sum(known.max_rank > 0 and known.groups != groups for known in self._footprints)
        if found not in self._footprints and partial >= PARTIAL_FOOTPRINTS:
            found = LoraFootprint(rank, groups)
        self._footprints[found] = None
        return found

    def _capture_decode(self, batch: int, footprint: LoraFootprint) -> DecodeGraph:
        attention = self._kv.static_attention(batch, self._max_tokens)
        graph = self._decode_graphs[batch, footprint] = DecodeGraph(self._state, attention, footprint)
        return graph

    def _decode(self, packed: Packed, ready: tuple[Sequence, ...], footprint: LoraFootprint) -> Chosen:
        batch = next(batch for batch in self._batches if batch >= len(ready))
        graph = covering_graph(self._decode_graphs, batch, footprint) or self._capture_decode(batch, footprint)
        slots = [self._token_slots.slot(sequence) for sequence in ready]
        known = [NOT_FINITE if sequence.flying else sequence.tokens[-1] for sequence in ready]
        logits, best = graph.run(packed.runs, slots, known, packed.segments)
        chosen = self._sampler.choose(logits, best, ready)
        if not chosen.likeliest:  # else the graph has stored them
            self._store(slots, chosen.tokens)
        return chosen

    def _mixed(self, packed: Packed, ready: tuple[Sequence, ...], footprint: LoraFootprint | None) -> Chosen:
        """A step with chunks of prompts: as a graph if one holds it, else kernel by kernel."""
        rows = rows_of(packed.shares, self._token_slots)
        graph = None if footprint is None else self._mixed_graphs.holding(packed.runs, footprint)
        if graph is None:
            logits, best = self._kernel_by_kernel(packed, rows)
        else:
            logits, best = graph.run(rows, packed.runs, packed.segments)
        chosen = self._sampler.choose(logits, best, ready)
        if graph is None or not chosen.likeliest:  # else the graph has stored them
            self._store(rows.to, chosen.tokens)
        return chosen

    def _kernel_by_kernel(self, packed: Packed, rows: Rows) -> tuple[Tensor, Tensor]:
        """Logits of the sequences that sample a token, and the likeliest tokens."""
        given_T, slots_T, positions_T, keep_R = send_ids(
            self._device, rows.tokens, rows.slots, rows.positions, rows.keep or [0]
        )
        tokens_T = self._token_slots.fill(given_T, slots_T)
        lora = None if packed.segments is None else slot_lora(self._adapter_slots, packed.segments)
        attention = self._kv.attention(packed.runs)
        logits = self._fused.forward(tokens_T, positions_T, attention, lora=lora, keep=keep_R)[: len(rows.keep)]
        return logits, likeliest(logits)

    def _store(self, slots: Items[int], chosen: Tensor) -> None:
        """The next step reads these tokens on the device."""
        if slots:
            self._token_slots.store(send_ids(self._device, slots)[0], chosen)
