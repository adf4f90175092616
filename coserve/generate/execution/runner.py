"""Steps at full speed on a GPU: nothing waits for the device but the reading of tokens, one step later.

A chosen token goes on the device straight into the place from which the next step takes its input (a *lane*, one a
sequence), and on its way to the host in the background. So step n + 1 is planned, packed and launched while step n runs,
before anybody knows n's tokens. A step runs as one CUDA graph, if there is one that holds it, else kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.generate.batch import by_adapter
from coserve.generate.execution.graphs.decode import DecodeGraph, Results, make_place, serving, tokens_of
from coserve.generate.execution.graphs.mixed import MIXED_BUCKETS, MixedGraphs, Rows, mixed_rooms, rows_of
from coserve.generate.execution.slots import NO_ADAPTERS, WIDTHS, AdapterSlots, Scope, scope_of, slot_lora
from coserve.generate.sampling.device_sampler import DeviceSampler
from coserve.generate.sampling.draws import likeliest
from coserve.generate.sampling.sampler import Choice, Chosen, NoToken, choices, send_ids
from coserve.generate.schedule import Share
from coserve.generate.sequences import Sequence
from coserve.kernels.attention.interface import Run
from coserve.kernels.lora.segments import Segments
from coserve.kernels.sampling.sampling import NOT_FINITE
from coserve.memory.kv import KvCache
from coserve.model.fused import FusedBase

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sizes of decode batches that graphs are captured for; a batch is padded to the next one."""
INDUCTOR = {"combo_kernels": True}
"""Options of torch.compile: small kernels that do not depend on each other run as one (rotary of q and of k)."""
PART_SCOPES = 2
"""Scopes that leave some groups of sites out and get graphs of their own, at most; others use those of all groups."""
LANES = 4096
"""Sequences that have chosen a token and not ended, at most; lane 0 is nobody's."""


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
        step_tokens: int = MIXED_BUCKETS[-1],
    ) -> None:
        """`slots`: adapters that steps find on the device at once, at least `max_running`. `step_tokens`: most tokens of a
        step that graphs are captured for."""
        base = fused.base
        self._fused, self._kv, self._device = fused, kv, base.device
        self._max_tokens = min(base.spec.context, kv.tokens)
        self._sampler, self._sampler_warm = DeviceSampler(base.spec.vocab, base.device), False
        self._slots = AdapterSlots(fused.groups, max(slots or 0, max_running), base.device)
        self._buckets = tuple(b for b in BUCKETS if b < max_running) + tuple(b for b in BUCKETS if b >= max_running)[:1]
        self._graphs: dict[tuple[int, Scope], DecodeGraph] = {}
        self._scopes: dict[Scope, None] = {NO_ADAPTERS: None}
        """Of steps so far, and those that were asked for."""
        self._last = torch.zeros(LANES, dtype=torch.int64, device=base.device)
        """The newest token of each lane."""
        self._lanes: dict[Sequence, int] = {}
        self._free = list(range(LANES - 1, 0, -1))
        self._place = make_place(base.device)
        self._results = Results(self._buckets[-1])
        rooms = mixed_rooms(step_tokens, self._buckets[-1], self._max_tokens)
        self._mixed_graphs = MixedGraphs(fused, kv, self._last, self._slots, rooms, self._results, self._place)

    def warm_up(self, ranks: Items[int] = (16,)) -> None:
        """Captures the graphs of steps without adapters, and of steps whose adapters are of these ranks, at any sites."""
        while self.prepare(ranks):
            pass

    def prepare(self, ranks: Items[int] = (16,)) -> bool:
        """A piece of `warm_up`, for the scopes of steps so far, too: the sampler's kernels, or the graphs of one size.

        False if nothing was left of it.
        """
        if not self._sampler_warm:
            self._sampler.warm_up(self._fused.base.dtype)
            self._sampler_warm = True
            return True
        for rank in ranks:
            if (width := _width(rank)) is not None:
                self._scopes[Scope(width, self._slots.all_groups)] = None
        for scope in self._scopes:
            if self._mixed_graphs.prepare(scope):
                return True
            bucket = next((b for b in reversed(self._buckets) if (b, scope) not in self._graphs), None)
            if bucket is not None:
                self._graph(bucket, scope)
                return True
        return False

    def launch(self, shares: Items[Share]) -> Flight:
        """Start a step. What `computed` says of its sequences is from before it."""
        packed = self._pack(shares)
        ready = tuple(s.sequence for s in packed.shares if s.tokens == s.sequence.pending)
        scope = NO_ADAPTERS if packed.segments is None else self._scope(packed.segments)
        decode = len(ready) == len(packed.shares) and all(s.tokens == 1 for s in packed.shares)
        if decode and scope is not None and len(ready) <= self._buckets[-1]:
            chosen = self._decode(packed, ready, scope)
        else:
            chosen = self._mixed(packed, ready, scope)
        host = chosen.fetch()
        done = torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if done is not None:
            done.record()
        return Flight(ready, host, done)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._sampler.forget(sequence)
        lane = self._lanes.pop(sequence, None)
        if lane is not None:
            self._free.append(lane)

    def _pack(self, shares: Items[Share]) -> Packed:
        groups = by_adapter(shares)
        adapted = [group for adapter, group in groups.items() if adapter is not None]
        slots = self._slots.place([w for group in adapted if (w := group[0].sequence.weights) is not None])
        ordered = [share for group in groups.values() for share in group]
        runs = [Run(s.tokens, s.sequence.computed, tuple(s.sequence.pages)) for s in ordered]
        if not adapted:
            return Packed(ordered, None, runs)
        bounds = [0]
        for group in groups.values():
            bounds.append(bounds[-1] + sum(share.tokens for share in group))
        return Packed(ordered, Segments(tuple(bounds), (*slots, *[-1] * (len(groups) - len(slots)))), runs)

    def _scope(self, segments: Segments) -> Scope | None:
        """That of the graphs for the step, to be prepared from now on; None: its ranks are too large for any."""
        exact = scope_of(self._slots, segments)
        width, groups = _width(exact.width), self._slots.all_groups
        if width is None:
            return None
        found = Scope(width, exact.groups)
        parts = sum(scope.width > 0 and scope.groups != groups for scope in self._scopes)
        if found not in self._scopes and parts >= PART_SCOPES:
            found = Scope(width, groups)
        self._scopes[found] = None
        return found

    def _graph(self, bucket: int, scope: Scope) -> DecodeGraph:
        attention = self._kv.static_attention(bucket, self._max_tokens)
        own = attention, self._last, self._slots, scope, self._results, self._place
        self._graphs[bucket, scope] = DecodeGraph(self._fused, *own)
        return self._graphs[bucket, scope]

    def _decode(self, packed: Packed, ready: tuple[Sequence, ...], scope: Scope) -> Chosen:
        bucket = next(bucket for bucket in self._buckets if bucket >= len(ready))
        graph = serving(self._graphs, bucket, scope) or self._graph(bucket, scope)
        lanes = [self._lane(sequence) for sequence in ready]
        known = [NOT_FINITE if sequence.flying else sequence.tokens[-1] for sequence in ready]
        graph.load(packed.runs, lanes, known, packed.segments)
        graph.replay()
        chosen = self._sampler.choose(graph.logits[: len(ready)], graph.chosen[: len(ready)], ready)
        if not chosen.likeliest:  # else the graph has kept them
            self._keep(lanes, chosen.tokens)
        return chosen

    def _mixed(self, packed: Packed, ready: tuple[Sequence, ...], scope: Scope | None) -> Chosen:
        """A step with parts of prompts in it: as a graph if one holds it, else kernel by kernel."""
        rows = rows_of(packed.shares, {share.sequence: self._lane(share.sequence) for share in packed.shares})
        graph = None if scope is None else self._mixed_graphs.holding(packed.runs, scope)
        if graph is None:
            logits, best = self._kernel_by_kernel(packed, rows)
        else:
            logits, best = graph.run(rows, packed.runs, packed.segments)
        chosen = self._sampler.choose(logits, best, ready)
        if graph is None or not chosen.likeliest:  # else the graph has kept them
            self._keep(rows.to, chosen.tokens)
        return chosen

    def _kernel_by_kernel(self, packed: Packed, rows: Rows) -> tuple[Tensor, Tensor]:
        """Logits of the ready sequences, and the likeliest tokens."""
        given_T, lanes_T, positions_T, keep_R = send_ids(
            self._device, rows.tokens, rows.lanes, rows.positions, rows.keep or [0]
        )
        tokens_T = tokens_of(given_T, self._last, lanes_T)
        lora = None if packed.segments is None else slot_lora(self._slots, packed.segments)
        attention = self._kv.attention(packed.runs)
        logits = self._fused.forward(tokens_T, positions_T, attention, lora=lora, keep=keep_R)[: len(rows.keep)]
        return logits, likeliest(logits)

    def _lane(self, sequence: Sequence) -> int:
        lane = self._lanes.get(sequence)
        if lane is None:
            lane = self._lanes[sequence] = self._free.pop()
        return lane

    def _keep(self, lanes: Items[int], chosen: Tensor) -> None:
        """The next step takes these tokens from the device."""
        if lanes:
            self._last.index_copy_(0, send_ids(self._device, lanes)[0], chosen.clamp_min(0))


def _width(rank: int) -> int | None:
    """The width of the graphs that serve a step's largest rank; None: no graph is that wide."""
    return next((width for width in WIDTHS if width >= rank), None)
