"""Steps at full speed on a GPU: the host waits only for sampled tokens, one step behind.

A sampled token is written on the device into its sequence's token slot, where the next step reads it, and is copied to
the host asynchronously. So step n + 1 is planned, packed and launched while step n runs, before the host knows n's
tokens. A step runs as one CUDA graph if one fits, otherwise kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from coserve.core.names import is_end, is_prefix
from coserve.core.types import AdapterRef
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.footprint import NO_ADAPTERS, GraphFootprints, LoraFootprint
from coserve.generate.execution.graph_sizes import MIXED_TOKENS, decode_batches, mixed_capacities
from coserve.generate.execution.graphs.decode import DecodeGraph, DecodeGraphs
from coserve.generate.execution.graphs.mixed import MixedGraphs, Rows, rows_of
from coserve.generate.execution.graphs.shared import GraphState, LogitsBuffer, make_graph_pool
from coserve.generate.execution.interface import SequenceInput, StepExecutor, StepInFlight, StepInput, StepResult
from coserve.generate.execution.packing import by_adapter, pack
from coserve.generate.execution.slot_lora import slot_lora
from coserve.generate.execution.snapshots import snapshots
from coserve.generate.execution.token_slots import TOKEN_SLOTS, TokenSlots
from coserve.generate.sampling.choices import Chosen, choices
from coserve.generate.sampling.device_sampler import DeviceSampler
from coserve.generate.sampling.draws import likeliest
from coserve.generate.sampling.masks import NO_MASKS, Masks
from coserve.generate.sampling.rows import SamplingRow, is_likeliest
from coserve.generate.sampling.transfer import send_ids
from coserve.kernels.attention.expanded import StepTerms
from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.lora.experts.interface import RemoteExperts, none_lost
from coserve.kernels.lora.segments import Segments
from coserve.kernels.sampling.constants import NOT_FINITE
from coserve.lora.store.packing import layout_of
from coserve.memory.graph_bytes import GraphBytes
from coserve.memory.kv import KvCache
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from coserve.model.parallel.lora import Strategy


class Pace(IntEnum):
    """Steps between two pieces of a capture under constant load. A piece takes the host some tens of milliseconds."""

    MISSING = 4
    """Without it, its steps run without a graph."""
    COVERED = 64
    """Another graph already serves its steps, at more sites or a larger rank than they need, some percent slower."""


_ENDED = object()


@dataclass
class GraphStep:
    """Implements `StepInFlight`."""

    sequences: list[int]
    sampled: list[int]
    """Numbers of the sequences that sample a token."""
    host: Chosen | None = None
    """The sampled tokens, being copied to the host; None: they are not chosen yet."""
    copied: torch.cuda.Event | None = None
    """Recorded after the copy of the tokens to `host`."""
    overlaps: bool = True
    check: Callable[[], None] = lambda: None
    """Raises if LoRA servers were lost during the step."""

    def chose(self, chosen: Chosen) -> None:
        """Start to copy the tokens to the host."""
        self.host = chosen.fetch()
        if chosen.tokens.is_cuda:
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()

    def collect(self) -> StepResult:
        assert self.host is not None, "expected `StepExecutor.choose` before the step is collected"
        if self.copied is not None:
            self.copied.synchronize()
        self.check()
        return StepResult(list(zip(self.sampled, choices(self.host), strict=True)))


@dataclass(frozen=True)
class _Batch:
    """A packed step: sequences in the order of their rows, with their adapters' slots."""

    sequences: list[SequenceInput]
    runs: list[TokenRun]
    sampling: list[SamplingRow]
    segments: Segments | None
    """`adapters` are slots; None: no adapter in the batch."""
    footprint: LoraFootprint | None
    """Footprint of the graphs that serve it; None: none does."""
    at_ends: tuple[Segments, list[LoraWeights]] | None
    """Segments and their adapters, if one changes the model's embedding or head: then no graph serves the step."""
    remote: bool
    """Whether LoRA servers compute terms of some adapters."""

    @property
    def decodes(self) -> bool:
        return len(self.sampling) == len(self.runs) and all(run.tokens == 1 for run in self.runs)


class GraphExecutor:
    """Implements `StepExecutor`. Sequences that need prompt logits go to `eager`, which runs after the step in
    flight."""

    def __init__(
        self,
        fused: FusedBase,
        kv: KvCache,
        eager: StepExecutor,
        *,
        max_running: int,
        step_tokens: int = MIXED_TOKENS[-1],
        capture: bool = True,
        graph_bytes: GraphBytes | None = None,
        remote: RemoteExperts | None = None,
    ) -> None:
        """`step_tokens`: largest step that graphs are captured for. `capture`: capture the graphs that steps need, in
        pieces, from calls of `prepare` and between steps (`Pace`); until then they run without, or in a graph that also
        computes LoRA terms that they do not need. `graph_bytes`: counts the memory of captures. `remote`: the LoRA
        servers, if there are any; `fused` has `opaque_experts` then."""
        base, self._remote = fused.base, remote
        self._fused, self._kv, self._eager, self._device = fused, kv, eager, base.device
        self._sampler, self._sampler_warm = DeviceSampler(base.spec.vocab, base.device), False
        self._adapter_slots = AdapterSlots(
            fused.groups, max_running, base.device, fused.exchanges, base.sites.biases, [*base.spec.experts]
        )
        self._token_slots = TokenSlots(base.device, max(TOKEN_SLOTS, 2 * max_running + 1))
        sharded = base.sharding is not None and base.sharding.strategy is Strategy.SLORA
        self._footprints = GraphFootprints(self._adapter_slots.all_groups, sharded=sharded)
        batches, context = decode_batches(max_running), min(base.spec.context, kv.tokens)
        logits, pool = LogitsBuffer(batches[-1]), make_graph_pool(base.device)
        recorded = None if remote is None else remote.recorded()
        state = GraphState(fused, self._token_slots, self._adapter_slots, logits, pool, recorded)
        self._decode_graphs = DecodeGraphs(state, kv, batches, context)
        capacities = mixed_capacities(step_tokens, batches[-1], context)
        self._mixed_graphs = MixedGraphs(state, kv, capacities)
        self._may_capture, self._steps = capture, 0
        self._graph_bytes, self._captures = graph_bytes or GraphBytes(None), pool
        self._capture: Iterator[None] | None = None
        """The capture in progress, if any."""
        self._pace, self._paced = Pace.MISSING, 0
        """The pace of captures, and the number of footprints when it was chosen: a new one may need a missing graph."""
        self._unchosen: Callable[[Masks], None] | None = None
        """Chooses the tokens of the launched step once its masks are given; None: the tokens are chosen."""
        self._ended: list[int] = []
        """Sequences that have ended since the last launch: the launched step may still sample for them."""

    @property
    def decode_graphs(self) -> tuple[tuple[int, LoraFootprint], ...]:
        """Batch and LoRA footprint of each decode graph, in the order of their capture."""
        return self._decode_graphs.captured

    @torch.no_grad()
    def warm_up(self, ranks: Sequence[int] = (16,)) -> None:
        """Capture the graphs of steps without adapters, and with adapters of these LoRA ranks at any sites."""
        while self.prepare(ranks):
            pass

    @property
    def graphs_missing(self) -> int:
        """Number of graphs that `prepare` still has to capture, as known now."""
        return sum(self._mixed_graphs.missing(one) + self._decode_graphs.missing(one) for one in self._footprints)

    def prepare(self, ranks: Sequence[int] = (16,)) -> bool:
        """Do one piece of `warm_up`, also for the footprints of past steps: the sampler's kernels, or a piece of one
        graph.

        Returns False if nothing was left to do.
        """
        if not self._sampler_warm:
            self._sampler.warm_up(self._fused.base.dtype)
            self._sampler_warm = True
            return True
        for rank in ranks:
            self._footprints.add_rank(rank)
        if self._capture is None:
            self._capture = self._next_capture()
        if self._capture is None:
            self._graph_bytes.complete = not self.graphs_missing
            return False
        self._graph_bytes.complete = False
        with self._graph_bytes.capturing(self._captures):
            ended = next(self._capture, _ENDED) is _ENDED
        if ended:
            self._capture = None
        return True

    def captures(self, rank: int, *, decodes: bool) -> Iterator[None]:
        """Capture, in pieces, all graphs of decode steps (or of mixed ones) with adapters up to LoRA rank `rank` at all
        sites (0: no adapters)."""
        footprint = self._footprints.of_rank(rank)
        graphs = self._decode_graphs if decodes else self._mixed_graphs
        while (capture := graphs.prepare(footprint)) is not None:
            yield from capture

    def _next_capture(self) -> Iterator[None] | None:
        """The next graph to capture, and its pace. The largest decode batch of a footprint comes first: all its decode
        steps can use it. Larger ranks come before smaller ones, whose steps they serve too, and graphs whose steps
        another one serves come last."""
        if not self._may_capture:
            return None
        decode, mixed = self._decode_graphs, self._mixed_graphs
        known = sorted(self._footprints, key=lambda one: -one.max_rank)
        first = (decode.prepare(one, covered=False) for one in known if not decode.any(one))
        others = (mixed.prepare(one, covered=False) or decode.prepare(one, covered=False) for one in known)
        found = next((capture for capture in chain(first, others) if capture is not None), None)
        self._pace, self._paced = Pace.COVERED if found is None else Pace.MISSING, len(known)
        covered = (mixed.prepare(one) or decode.prepare(one) for one in known)
        return found or next((capture for capture in covered if capture is not None), None)

    def launch(self, step: StepInput, adapters: Sequence[LoraWeights]) -> list[StepInFlight]:
        for sequence in self._ended:
            self._sampler.forget(sequence)
            self._token_slots.free(sequence)
        self._ended.clear()
        own = [sequence for sequence in step.sequences if not sequence.needs_prompt_logits]
        launched: list[StepInFlight] = [self._launch(StepInput(step.adapters, own), adapters)] if own else []
        if len(own) < len(step.sequences):
            others = [sequence for sequence in step.sequences if sequence.needs_prompt_logits]
            launched.extend(self._eager.launch(StepInput(step.adapters, others), adapters))
        self._steps += 1
        if self._unchosen is None:
            self._capture_a_piece()
        return launched

    def _capture_a_piece(self) -> None:
        """Capture a piece of the next graph while the device computes a step. Call it once the step's tokens are
        chosen: captures use the same buffers."""
        pace = self._pace if len(self._footprints) == self._paced else Pace.MISSING
        if self._may_capture and self._steps % pace == 0:
            self.prepare()

    def choose(self, masks: Masks) -> None:
        self._eager.choose(masks)
        unchosen, self._unchosen = self._unchosen, None
        if unchosen is not None:
            unchosen(masks)
            self._capture_a_piece()

    def forget(self, sequence: int) -> None:
        self._ended.append(sequence)

    def evicted(self, adapter: AdapterRef) -> None:
        self._adapter_slots.free(adapter)
        self._eager.evicted(adapter)

    def kept(self, weights: LoraWeights) -> None:
        # the layout tells it without copying pairs to the GPU
        places = {name: place for name, place in layout_of(weights).places.items() if not is_prefix(name)}
        if places and not any(map(is_end, places)):  # embedding or head: no graphs
            kind = "experts" if self._remote is None else "remote"
            self._footprints.add_adapter(
                max(place.rank for place in places.values()),
                self._adapter_slots.groups_of(places),
                scaled=weights.settings.use_dora,
                **{kind: any(place.like.experts > 1 for place in places.values())},
            )

    @property
    def troubles(self) -> tuple[str, ...]:
        count = len(self._decode_graphs.left_out) + len(self._mixed_graphs.left_out)
        if not count:
            return ()
        why = "as their capture failed (see the log); their steps run without"
        return (f"generation: {count} CUDA graphs are left out, {why}",)

    def _launch(self, step: StepInput, adapters: Sequence[LoraWeights]) -> GraphStep:
        batch = self._pack(step, adapters)
        graph = None
        if batch.footprint is not None and batch.decodes:
            graph = self._decode_graphs.holding(len(batch.runs), batch.footprint)
        launched = GraphStep([own.sequence for own in batch.sequences], [row.sequence for row in batch.sampling])
        if self._remote is not None and batch.remote:
            # A step's exchanges have the numbers of the next one's. And the host ends waits for one step at a time.
            launched.overlaps, launched.check = False, none_lost(self._remote)
        with snapshots(self._kv, batch.sequences):
            choose = self._mixed(batch) if graph is None else self._decode(batch, graph)
        self._unchosen = None
        if any(row.masked for row in batch.sampling):
            self._unchosen = lambda masks: launched.chose(choose(masks))
        else:
            launched.chose(choose(NO_MASKS))
        return launched

    def _pack(self, step: StepInput, adapters: Sequence[LoraWeights]) -> _Batch:
        packed = pack(by_adapter(step.sequences))
        segments, footprint, at_ends = None, None, None
        slots = self._adapter_slots.place({step.adapters[index]: adapters[index] for index in packed.adapters})
        if slots:
            segments = Segments(packed.bounds, packed.segment_adapters(slots))
            used = [adapters[index] for index in packed.adapters]
            if any(one.ends for one in used):
                at_ends = Segments(packed.bounds, packed.segment_adapters(range(len(used)))), used
            else:
                footprint = self._footprints.serving(self._adapter_slots.footprint(segments))
        return _Batch(
            packed.sequences,
            [own.run for own in packed.sequences],
            [own.sampling for own in packed.sequences if own.sampling is not None],
            segments,
            NO_ADAPTERS if segments is None else footprint,
            at_ends,
            any(adapters[index].remote >= 0 for index in packed.adapters),
        )

    def _decode(self, batch: _Batch, graph: DecodeGraph) -> Callable[[Masks], Chosen]:
        """Run a decode step. Return the function that chooses its tokens."""
        slots = [self._token_slots.slot(own.sequence) for own in batch.sequences]
        known = [own.tokens[0] if own.tokens else NOT_FINITE for own in batch.sequences]
        logits, best = graph.run(batch.runs, slots, known, batch.segments)
        return lambda masks: self._choose(logits, best, batch.sampling, slots, masks, stored=True)

    def _mixed(self, batch: _Batch) -> Callable[[Masks], Chosen]:
        """Run a step with prompt chunks, or one too large for a decode graph: as a graph if one fits, otherwise kernel
        by kernel. Return the function that chooses its tokens."""
        rows = rows_of(batch.sequences, self._token_slots)
        graph = None
        if batch.footprint is not None and not self._kv.expands(batch.runs):
            graph = self._mixed_graphs.holding(batch.runs, batch.footprint)
        if graph is None:
            logits, best = self._kernel_by_kernel(batch, rows)
        else:
            logits, best = graph.run(rows, batch.runs, batch.segments)
        stored = graph is not None
        return lambda masks: self._choose(logits, best, batch.sampling, rows.to, masks, stored=stored)

    def _choose(
        self,
        logits: Tensor,
        best: Tensor,
        rows: Sequence[SamplingRow],
        slots: Sequence[int],
        masks: Masks,
        *,
        stored: bool,
    ) -> Chosen:
        """Choose the tokens and write them to their slots, where the next step reads them. `stored`: a graph has
        written `best` there."""
        chosen = self._sampler.choose(logits, best, rows, masks)
        if slots and not (stored and chosen.likeliest):
            self._token_slots.store(send_ids(self._device, slots)[0], chosen.tokens)
        return chosen

    def _kernel_by_kernel(self, batch: _Batch, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return logits of the rows that sample a token (only this rank's vocabulary shard if the logits are not read),
        and the most likely tokens."""
        given_T, slots_T, positions_T, keep_R = send_ids(
            self._device, rows.tokens, rows.slots, rows.positions, rows.keep or [0]
        )
        tokens_T = self._token_slots.fill(given_T, slots_T)
        lora, terms = None, None
        if batch.segments is not None:
            terms = StepTerms(batch.segments, partial(slot_lora, self._adapter_slots))
            lora = terms.prepare(batch.segments)
        if lora is not None and batch.segments is not None and self._remote is not None:
            lora.remote = self._remote.step(batch.segments, self._adapter_slots.remote)
        ends = batch.at_ends and self._fused.base.ends.prepare(*batch.at_ends, rows.keep or [0], self._device)
        attention = self._kv.attention(batch.runs, terms)
        sharding = self._fused.base.sharding
        if sharding is not None and batch.sampling and all(map(is_likeliest, batch.sampling)):
            parts = self._fused.forward(tokens_T, positions_T, attention, lora=lora, keep=keep_R, gather=False)
            parts = parts[: len(rows.keep)]
            return parts, sharding.vocabulary.likeliest(parts)
        logits = self._fused.forward(tokens_T, positions_T, attention, lora=lora, keep=keep_R, ends=ends)
        logits = logits[: len(rows.keep)]
        return logits, likeliest(logits)
