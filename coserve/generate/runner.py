"""Steps at full speed on a GPU: nothing waits for the device but the reading of tokens, one step later.

A chosen token goes on the device straight into the place from which the next step takes its input (a *lane*, one a
sequence), and on its way to the host in the background. So step n + 1 is planned, packed and launched while step n runs,
before anybody knows n's tokens. Decode steps run as one CUDA graph by batch size; steps with prompts run packed.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.generate.batch import by_adapter
from coserve.generate.device_sampler import DeviceSampler
from coserve.generate.draws import likeliest
from coserve.generate.graphs import DecodeGraph
from coserve.generate.sampler import Choice, Chosen, choices, send_ids
from coserve.generate.schedule import Share
from coserve.generate.sequences import Sequence
from coserve.generate.slots import WIDTHS, AdapterSlots, slot_lora, width_of
from coserve.kernels.sampling import NOT_FINITE
from coserve.kernels.segments import Segments
from coserve.kernels.tiles import Run
from coserve.memory.kv import KvCache
from coserve.model.fused import FusedBase

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sizes of decode batches that graphs are captured for; a batch is padded to the next one."""
INDUCTOR = {"combo_kernels": True}
"""Options of torch.compile: small kernels that do not depend on each other run as one (rotary of q and of k)."""
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

    def land(self) -> list[Choice | None]:
        """Waits for the step's tokens; None where the logits were not finite."""
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

    def __init__(self, fused: FusedBase, kv: KvCache, *, max_running: int, slots: int | None = None) -> None:
        """`slots`: adapters that steps find on the device at once, at least `max_running`."""
        base = fused.base
        self._fused, self._kv, self._device = fused, kv, base.device
        self._max_tokens = min(base.spec.context, kv.tokens)
        self._sampler, self._sampler_warm = DeviceSampler(base.spec.vocab, base.device), False
        self._slots = AdapterSlots(fused.groups, max(slots or 0, max_running), base.device)
        self._buckets = tuple(b for b in BUCKETS if b < max_running) + tuple(b for b in BUCKETS if b >= max_running)[:1]
        self._graphs: dict[tuple[int, int], DecodeGraph] = {}
        self._last = torch.zeros(LANES, dtype=torch.int64, device=base.device)
        """The newest token of each lane."""
        self._lanes: dict[Sequence, int] = {}
        self._free = list(range(LANES - 1, 0, -1))
        self._memory = torch.cuda.graph_pool_handle() if base.device.type == "cuda" else None

    def warm_up(self, ranks: Items[int] = (16,)) -> None:
        """Captures the graphs of steps without adapters, and of steps whose adapters are of these ranks."""
        while self.prepare(ranks):
            pass

    def prepare(self, ranks: Items[int] = (16,)) -> bool:
        """A piece of `warm_up`: the sampler's kernels, or one graph. False if nothing was left of it."""
        if not self._sampler_warm:
            self._sampler.warm_up(self._fused.base.dtype)
            self._sampler_warm = True
            return True
        wanted = ((bucket, width) for width in (0, *ranks) for bucket in reversed(self._buckets))
        missing = next((key for key in wanted if key not in self._graphs), None)
        if missing is not None:
            self._graph(*missing)
        return missing is not None

    def launch(self, shares: Items[Share]) -> Flight:
        """Start a step. What `computed` says of its sequences is from before it."""
        packed = self._pack(shares)
        ready = tuple(s.sequence for s in packed.shares if s.tokens == s.sequence.pending)
        width = 0 if packed.segments is None else self._width(packed.segments)
        decode = len(ready) == len(packed.shares) and all(s.tokens == 1 for s in packed.shares)
        if decode and width is not None and len(ready) <= self._buckets[-1]:
            chosen = self._decode(packed, ready, width)
        else:
            chosen = self._mixed(packed, ready)
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

    def _width(self, segments: Segments) -> int | None:
        """The width of the graph that serves the step's ranks; None: no graph is that wide."""
        need = width_of(self._slots, segments)
        return next((width for width in WIDTHS if width >= need), None)

    def _graph(self, bucket: int, width: int) -> DecodeGraph:
        if (bucket, width) not in self._graphs:
            self._graphs[bucket, width] = DecodeGraph(
                self._fused,
                self._kv.static_attention(bucket, self._max_tokens),
                self._last,
                self._slots if width else None,
                width,
                self._memory,
            )
        return self._graphs[bucket, width]

    def _decode(self, packed: Packed, ready: tuple[Sequence, ...], width: int) -> Chosen:
        graph = self._graph(next(bucket for bucket in self._buckets if bucket >= len(ready)), width)
        lanes = [self._lane(sequence) for sequence in ready]
        known = [NOT_FINITE if sequence.flying else sequence.tokens[-1] for sequence in ready]
        graph.load(packed.runs, lanes, known, packed.segments)
        graph.replay()
        chosen = self._sampler.choose(graph.logits[: len(ready)], graph.chosen[: len(ready)], ready)
        if not chosen.likeliest:  # else the graph has kept them
            self._keep(lanes, chosen.tokens)
        return chosen

    def _mixed(self, packed: Packed, ready: tuple[Sequence, ...]) -> Chosen:
        """A step with parts of prompts in it."""
        tokens: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        rows, flying = list[int](), list[int]()
        for share in packed.shares:
            sequence, start, end = share.sequence, share.sequence.computed, share.sequence.computed + share.tokens
            tokens.extend(sequence.tokens[start:end])
            positions.extend(range(start, end))
            if len(tokens) < len(positions):  # its last token is on the device only
                tokens.append(0)
                rows.append(len(tokens) - 1)
                flying.append(self._lane(sequence))
            if share.tokens == sequence.pending:
                keep.append(len(tokens) - 1)
        tokens_T, positions_T, keep_R, rows_F, flying_F = send_ids(
            self._device, tokens, positions, keep or [0], rows, flying
        )
        if rows:
            tokens_T.index_copy_(0, rows_F, self._last.index_select(0, flying_F))
        lora = None if packed.segments is None else slot_lora(self._slots, packed.segments)
        attention = self._kv.attention(packed.runs)
        logits = self._fused.forward(tokens_T, positions_T, attention, lora=lora, keep=keep_R)[: len(ready)]
        chosen = self._sampler.choose(logits, likeliest(logits), ready)
        self._keep([self._lane(sequence) for sequence in ready], chosen.tokens)
        return chosen

    def _lane(self, sequence: Sequence) -> int:
        lane = self._lanes.get(sequence)
        if lane is None:
            lane = self._lanes[sequence] = self._free.pop()
        return lane

    def _keep(self, lanes: Items[int], chosen: Tensor) -> None:
        """The next step takes these tokens from the device."""
        if lanes:
            self._last.index_copy_(0, send_ids(self._device, lanes)[0], chosen.clamp_min(0))
