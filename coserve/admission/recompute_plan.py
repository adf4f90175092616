"""Recompute plans: how a job trains in the available memory, with smaller micro-batches, or with layers recomputed,
wholly or all but attention. Pure: no torch, no IO."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from coserve.admission.micro_batch import (
    Counts,
    Floats,
    MicroBatchModel,
    MicroBatchShape,
    lora_layers,
    micro_batch_bytes,
    padded,
)
from coserve.admission.ranks import keeps_reference
from coserve.admission.shapes import (
    JobStateBytes,
    SiteShape,
    gathered_bytes,
    job_state_bytes,
    lora_shapes,
    pinned_bytes,
)
from coserve.core.gpu_memory import Kept, MemoryModel, TrainingCosts
from coserve.core.training.jobs import JobSpec
from coserve.core.types import BaseSpec, LoraSettings
from coserve.data.corpus.limits import micro_batch_limit
from coserve.data.documents.encoder import encoded_tokens

LAUNCH_BOUND_TOKENS = 2000
"""Tokens below which an uncompiled micro-batch is launch-bound: a smaller one takes as long. An 8B shape on an H200, at
263ac28: 512 tokens take 128 ms, 2048 138 ms, 4096 264 ms."""
OVERHEAD_TOKENS = 190
"""Fixed cost of each micro-batch, in tokens. With CUDA graphs, 512 tokens take 44 ms, 2048 131 ms and 4096 251 ms."""
RECOMPUTE_OVERHEAD = 0.43
"""Extra time of a micro-batch that recomputes every layer, as a fraction of one that keeps everything (8B, H200,
5c1e67a; docs/LOG.md, Memory)."""

Number = TypeVar("Number", float, Floats)


@dataclass(frozen=True)
class Overheads:
    """Extra time of a recomputed layer, as a fraction of a layer that keeps everything."""

    recomputed: float = RECOMPUTE_OVERHEAD
    partly: float = RECOMPUTE_OVERHEAD
    """For a layer that recomputes all but attention."""

    def longer(self, recomputed: Number, partly: Number, layers: int) -> Number:
        """Return the extra time, as a fraction, of a micro-batch with these counts of recomputed layers out of
        `layers`."""
        return (self.recomputed * recomputed + self.partly * partly) / layers

    @classmethod
    def of(cls, costs: TrainingCosts, row: float) -> Overheads:
        """Return the measured overheads for rows of `row` tokens, else the defaults."""
        whole = 0.0 if costs.time is None else costs.time.at(row)
        if whole <= 0 or not costs.levels:
            return cls()
        return cls(*(max(0.0, costs.levels[kept].time.at(row) / whole - 1) for kept in (Kept.INPUT, Kept.ATTENTION)))


@dataclass(frozen=True)
class RecomputePlan:
    """A job's recompute plan: the size of its micro-batches, and which layers the backward recomputes."""

    tokens: int
    """Most tokens of a micro-batch, unless a single row is longer."""
    recomputed: int = 0
    """Number of layers, from the lowest trained one up, that keep their input only; the backward recomputes the
    rest."""
    partly: int = 0
    """Number of layers above them that keep their input and attention's output; the backward recomputes the rest.
    Compiled layers only."""
    compiled: bool = False
    """Whether it was planned for compiled layers, which take less memory than the base's own."""

    def alike(self, other: RecomputePlan) -> bool:
        """Return whether both plans compute the same; only `compiled` may differ."""
        return (self.tokens, self.recomputed, self.partly) == (other.tokens, other.recomputed, other.partly)

    def time(self, layers: int, overheads: Overheads = Overheads()) -> float:
        """Return the time per token, relative to large micro-batches without recomputation. `layers`: layers of the
        base."""
        size = self.tokens if self.compiled else max(self.tokens, LAUNCH_BOUND_TOKENS)
        longer = overheads.longer(self.recomputed, self.partly, layers)
        return (size + OVERHEAD_TOKENS) / self.tokens * (1 + longer)


@dataclass(frozen=True)
class Option:
    """A recompute plan, and the bytes of a micro-batch with it."""

    recompute_plan: RecomputePlan
    activations: int


@dataclass(frozen=True)
class JobMemory:
    """Memory that one job needs."""

    state: JobStateBytes
    pinned: int
    """Bytes of pinned host memory, over all ranks."""
    host: int
    """Bytes of host memory, over all ranks, `pinned` included (`host_bytes`)."""
    options: tuple[Option, ...]
    """Recompute plans, fastest first; each takes less memory than all before it."""
    shapes: tuple[SiteShape, ...]
    dropout: bool

    @property
    def least(self) -> int:
        return self.state.total + self.options[-1].activations

    def best(self, activations: int) -> Option | None:
        """Return the fastest plan whose micro-batches take at most `activations` bytes; None: none does."""
        return next((option for option in self.options if option.activations <= activations), None)


def _shapes(settings: LoraSettings, base: BaseSpec, *, ranks: int, fully_sharded: bool) -> tuple[SiteShape, ...]:
    """Return an adapter's shapes on one GPU while it learns. DoRA is never fully sharded then."""
    return lora_shapes(settings, base, ranks=ranks, fully_sharded=fully_sharded and not settings.use_dora)


def host_bytes(spec: JobSpec, base: BaseSpec, *, ranks: int, fully_sharded: bool) -> int:
    """Return the host memory that a job's state takes, over all ranks.

    On a GPU these are pinned copies, and the fp32 weights that it starts with, which the host holds until the GPU has
    them. On a CPU it is the state itself and a copy of it. Raises as `job_memory`.
    """
    shapes = _shapes(spec.lora, base, ranks=ranks, fully_sharded=fully_sharded)
    state = _job_state(spec, base, shapes, ranks=ranks, fully_sharded=fully_sharded)
    return _pinned(spec, base, shapes, ranks) + ranks * _host_state(state, base, shapes)


def _host_state(state: JobStateBytes, base: BaseSpec, shapes: tuple[SiteShape, ...]) -> int:
    """Return the bytes of host memory of one rank's state beside its copies. `state`, `shapes`: on its device."""
    if base.device == "cpu":  # the copy is made once the start's weights are gone
        return state.total
    return sum(4 * part for shape in shapes for part in shape.parts)


def _pinned(spec: JobSpec, base: BaseSpec, shapes: tuple[SiteShape, ...], ranks: int) -> int:
    """Return the bytes of a job's copies for checkpoints and of paged moments, pinned on a GPU, over all ranks: rank 0
    keeps what it gathers, the others their own shards. `shapes`: the adapter's on one rank."""
    optimizer, early = spec.training.optimizer, spec.training.early_stopping_patience is not None
    size = pinned_bytes(shapes, optimizer, early_stopping=early)
    if ranks == 1:
        return size
    whole = lora_shapes(spec.lora, base)
    return (ranks - 1) * size + gathered_bytes(shapes, whole, ranks, optimizer, early_stopping=early)


def _job_state(
    spec: JobSpec, base: BaseSpec, shapes: tuple[SiteShape, ...], *, ranks: int, fully_sharded: bool
) -> JobStateBytes:
    """Return what a job keeps on one device between micro-batches. `shapes`: the adapter's on that device."""
    compared = shapes if keeps_reference(spec.training, continues=spec.init_from is not None) else ()
    if spec.teacher is not None:
        taught = LoraSettings(r=spec.teacher.rank)
        compared = lora_shapes(taught, base, ranks=ranks, fully_sharded=fully_sharded)
    early = spec.training.early_stopping_patience is not None
    return job_state_bytes(shapes, base.dtype, spec.training.optimizer, early_stopping=early, compared=compared)


def job_memory(spec: JobSpec, base: BaseSpec, model: MemoryModel, micro_batch_tokens: int) -> JobMemory:
    """Return what a job needs. `micro_batch_tokens`: the engine's limit. Raises `InvalidRequest` for LoRA settings that
    do not fit the base."""
    shapes = _shapes(spec.lora, base, ranks=model.ranks, fully_sharded=model.fully_sharded)
    state = _job_state(spec, base, shapes, ranks=model.ranks, fully_sharded=model.fully_sharded)
    pinned = _pinned(spec, base, shapes, model.ranks)
    host = pinned + model.ranks * _host_state(state, base, shapes)
    limit = micro_batch_limit(spec.training, micro_batch_tokens)
    longest = min(spec.longest or limit, limit)
    # A step has `batch_tokens` tokens plus at most one row; an evaluation fills micro-batches to the limit.
    most = limit if spec.training.held_back else min(limit, spec.training.batch_tokens + longest)
    most = max(longest, min(most, spec.tokens + encoded_tokens(spec)))
    dropout = spec.lora.dropout > 0
    embedding = any(shape.layer < 0 for shape in shapes)  # then a gradient goes through all layers
    own_layers = dropout or embedding or spec.teacher is not None or any(shape.kept for shape in shapes)
    compiled = None if own_layers else model.compiled
    costs, graphs = compiled or model.costs, compiled is not None or (model.graphs and not own_layers)
    layers = lora_layers(costs, shapes, base.dtype, dropout=dropout)

    def shape(tokens: int) -> MicroBatchShape:
        return MicroBatchShape(
            padded(tokens) if graphs else tokens,
            min(tokens, spec.target_tokens),
            graphs=graphs,
            teacher=spec.teacher is not None,
            pairs=spec.training.loss is not None,
        )

    trained = base.layers - (0 if embedding else min(layers))
    whole = np.array([trained]) if model.recompute else np.arange(trained + 1)
    partly = np.arange(trained + 1 if costs.levels else 1)
    pairs = np.stack([each.ravel() for each in np.meshgrid(whole, partly, indexing="ij")])
    counts = pairs[:, pairs.sum(0) <= trained]
    overheads = Overheads.of(costs, spec.tokens / max(1, spec.rows))
    predict = MicroBatchModel(costs, base, layers)
    tried = [RecomputePlan(tokens, compiled=compiled is not None) for tokens in _halves(most, longest)]
    sizes = np.rint(np.concatenate([predict.bytes(shape(one.tokens), counts[0], counts[1])[1] for one in tried]))
    longer = overheads.longer(counts[0], counts[1], base.layers)
    times = np.concatenate([one.time(base.layers) * (1 + longer) for one in tried])
    options = []
    for place in _falling(sizes, times):
        size, count = divmod(int(place), counts.shape[1])
        recomputed, but_attention = counts[:, count].tolist()
        recompute_plan = replace(tried[size], recomputed=recomputed, partly=but_attention)
        options.append(Option(recompute_plan, int(sizes[place])))
    return JobMemory(state, pinned, host, tuple(options), shapes, dropout)


def shared_bytes(model: MemoryModel, base: BaseSpec, jobs: Iterable[JobMemory], tokens: int) -> int:
    """Return an upper bound of the bytes of a micro-batch of `tokens` tokens that these jobs share. It assumes one
    adapter with every site that any of them has, at the largest LoRA rank, that has all tokens, all of them targets."""
    sites, dropout = dict[str, SiteShape](), False
    for job in jobs:
        dropout |= job.dropout
        for shape in job.shapes:
            before = sites.get(shape.name)
            sites[shape.name] = shape if before is None or before.rank < shape.rank else before
    own_layers = dropout or any(shape.kept or shape.layer < 0 for shape in sites.values())
    compiled = None if own_layers else model.compiled
    costs, graphs = compiled or model.costs, compiled is not None or (model.graphs and not own_layers)
    layers = lora_layers(costs, sites.values(), base.dtype, dropout=dropout)
    recomputed = base.layers if model.recompute else 0
    batch = MicroBatchShape(padded(tokens) if graphs else tokens, tokens, recomputed, graphs=graphs)
    return micro_batch_bytes(costs, base, layers, batch).peak


def _falling(sizes: Floats, times: Floats) -> Counts:
    """Return the indices of options that take less memory than every faster one, fastest first."""
    order = np.argsort(times, kind="stable")
    before = np.minimum.accumulate(np.concatenate(([np.inf], sizes[order])))[:-1]
    return order[sizes[order] < before]


def _halves(most: int, least: int) -> tuple[int, ...]:
    """Return `most`, its half, and so on; `least` last."""
    found = []
    while most > least:
        found.append(most)
        most //= 2
    return (*found, least)
