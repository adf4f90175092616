"""How a job trains within the memory there is: in smaller micro-batches, or with some layers computed again. Pure: no torch, no IO."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from coserve.admission.micro_batch import MicroBatchShape, lora_layers, micro_batch_bytes
from coserve.admission.padding import padded
from coserve.admission.shapes import JobState, SiteShape, job_state, lora_shapes
from coserve.corpus.limits import micro_batch_limit
from coserve.gpu_memory import MemoryModel
from coserve.types import BaseSpec, JobSpec, LoraSettings

LAUNCH_BOUND_TOKENS = 2000
"""Tokens that a GPU computes while the host launches a micro-batch operation by operation: a smaller one takes as long. Of an 8B shape
(`finetuning_263ac28.json`): 512 tokens take 128 ms, 2048 138 ms, 4096 264 ms."""
OVERHEAD_TOKENS = 190
"""Tokens that each micro-batch costs besides. As graphs, 512 take 44 ms, 2048 131 ms and 4096 251 ms."""
RECOMPUTE_OVERHEAD = 0.43
"""How much longer a micro-batch takes if every layer is computed again, relative to one that keeps all (`finetuning_5c1e67a.json`)."""


@dataclass(frozen=True)
class Treatment:
    """How a job's micro-batches are computed."""

    tokens: int
    """Most tokens of one, unless a single row is longer."""
    recomputed: int = 0
    """Layers, from the lowest trained one up, that keep their input only: the backward computes them again."""
    compiled: bool = False
    """Planned for compiled layers, which take less memory than the base's own."""

    def alike(self, other: Treatment) -> bool:
        """The same is computed, whatever it was planned for."""
        return (self.tokens, self.recomputed) == (other.tokens, other.recomputed)

    def time(self, layers: int) -> float:
        """Of one token, relative to one of large micro-batches that keep everything. `layers`: of the base."""
        size = self.tokens if self.compiled else max(self.tokens, LAUNCH_BOUND_TOKENS)
        return (size + OVERHEAD_TOKENS) / self.tokens * (1 + RECOMPUTE_OVERHEAD * self.recomputed / layers)


@dataclass(frozen=True)
class Option:
    """A treatment, and the bytes that a micro-batch takes with it."""

    treatment: Treatment
    activations: int


@dataclass(frozen=True)
class JobMemory:
    """What one job needs."""

    state: JobState
    options: tuple[Option, ...]
    """The fastest first; each takes less memory than all before it."""
    shapes: tuple[SiteShape, ...]
    dropout: bool

    @property
    def least(self) -> int:
        return self.state.total + self.options[-1].activations

    def best(self, activations: int) -> Option | None:
        """The fastest treatment whose micro-batches take at most so many bytes; None: none does."""
        return next((option for option in self.options if option.activations <= activations), None)


def job_memory(spec: JobSpec, base: BaseSpec, model: MemoryModel, micro_batch_tokens: int) -> JobMemory:
    """`micro_batch_tokens`: the engine's limit. Raises `InvalidRequest` for LoRA settings that do not fit the base."""
    shapes = lora_shapes(spec.lora, base, ranks=model.ranks, fully_sharded=model.fully_sharded)
    taught = LoraSettings() if spec.teacher is None else LoraSettings(r=spec.teacher.rank)
    teacher = (
        () if spec.teacher is None else lora_shapes(taught, base, ranks=model.ranks, fully_sharded=model.fully_sharded)
    )
    early = spec.training.early_stopping_patience is not None
    state = job_state(shapes, base.dtype, spec.training.optimizer, early_stopping=early, teacher=teacher)
    limit = micro_batch_limit(spec.training, micro_batch_tokens)
    longest = min(spec.longest or limit, limit)
    # A step has `batch_tokens` and at most one row more; an evaluation has as many as fit.
    most = limit if spec.training.validation_split else min(limit, spec.training.batch_tokens + longest)
    most = max(longest, min(most, spec.tokens))
    dropout = spec.lora.dropout > 0
    compiled = None if dropout or spec.teacher is not None else model.compiled
    costs = compiled or model.costs
    layers = lora_layers(costs, shapes, base.dtype, dropout=dropout)

    def option(treatment: Treatment) -> Option:
        tokens = treatment.tokens
        batch = MicroBatchShape(
            padded(tokens) if treatment.compiled else tokens,
            min(tokens, spec.target_tokens),
            treatment.recomputed,
            graphs=treatment.compiled,
            teacher=spec.teacher is not None,
            pairs=spec.training.loss is not None,
        )
        return Option(treatment, micro_batch_bytes(costs, base, layers, batch).peak)

    trained = base.layers - min(layers)
    counts = (trained,) if model.recompute else range(trained + 1)
    treatments = [Treatment(t, n, compiled is not None) for t in _halves(most, longest) for n in counts]
    options = map(option, sorted(treatments, key=lambda one: one.time(base.layers)))
    return JobMemory(state, tuple(_falling(options)), shapes, dropout)


def shared_bytes(model: MemoryModel, base: BaseSpec, jobs: Iterable[JobMemory], tokens: int) -> int:
    """At most what a micro-batch of `tokens` tokens takes in which these jobs share, whoever of them does: as if one adapter, at every site
    of any of them with the largest rank, had all its tokens, and all were targets."""
    sites, dropout = dict[str, SiteShape](), False
    for job in jobs:
        dropout |= job.dropout
        for shape in job.shapes:
            before = sites.get(shape.name)
            sites[shape.name] = shape if before is None or before.rank < shape.rank else before
    compiled = None if dropout else model.compiled
    costs, graphs = compiled or model.costs, compiled is not None
    layers = lora_layers(costs, sites.values(), base.dtype, dropout=dropout)
    recomputed = base.layers if model.recompute else 0
    batch = MicroBatchShape(padded(tokens) if graphs else tokens, tokens, recomputed, graphs=graphs)
    return micro_batch_bytes(costs, base, layers, batch).peak


def _falling(options: Iterable[Option]) -> Iterator[Option]:
    """Those that take less than all before them."""
    least: int | None = None
    for option in options:
        if least is None or option.activations < least:
            least = option.activations
            yield option


def _halves(most: int, least: int) -> tuple[int, ...]:
    """`most`, its half, and so on; `least` last."""
    found = []
    while most > least:
        found.append(most)
        most //= 2
    return (*found, least)
