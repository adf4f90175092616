"""How a job trains within the memory there is: in smaller micro-batches, or with layers computed again. Pure: no torch, no IO."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coserve.admission.micro_batch import MicroBatchShape, micro_batch_bytes
from coserve.admission.shapes import JobState, SiteShape, job_state, lora_shapes
from coserve.corpus.limits import micro_batch_limit
from coserve.gpu_memory import MemoryModel
from coserve.types import BaseSpec, JobSpec, LoraSettings

SMALL = 512
"""Tokens; smaller micro-batches leave the GPU idle for longer than it takes to compute layers again."""


@dataclass(frozen=True)
class Treatment:
    """How a job's micro-batches are computed."""

    tokens: int
    """Most tokens of one, unless a single row is longer."""
    recompute: bool


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
    """The fastest first; the last takes the least memory."""
    shapes: tuple[SiteShape, ...]
    dropout: bool

    @property
    def least(self) -> int:
        return self.state.total + min(option.activations for option in self.options)

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

    def option(tokens: int, *, recompute: bool) -> Option:
        batch = MicroBatchShape(
            tokens,
            min(tokens, spec.target_tokens),
            recompute,
            dropout=spec.lora.dropout > 0,
            teacher=spec.teacher is not None,
            pairs=spec.training.loss is not None,
        )
        return Option(Treatment(tokens, recompute), micro_batch_bytes(model.costs, base, shapes, batch).peak)

    plain = () if model.recompute else _halves(most, min(most, max(longest, SMALL)))
    options = [option(tokens, recompute=False) for tokens in plain]
    options += [option(tokens, recompute=True) for tokens in _halves(most, longest)]
    return JobMemory(state, tuple(options), shapes, spec.lora.dropout > 0)


def shared_bytes(model: MemoryModel, base: BaseSpec, jobs: Iterable[JobMemory], tokens: int) -> int:
    """At most what a micro-batch of `tokens` tokens takes in which these jobs share, whoever of them does: as if one adapter, at every site
    of any of them with the largest rank, had all its tokens, and all were targets."""
    sites, dropout = dict[str, SiteShape](), False
    for job in jobs:
        dropout |= job.dropout
        for shape in job.shapes:
            before = sites.get(shape.name)
            sites[shape.name] = shape if before is None or before.rank < shape.rank else before
    batch = MicroBatchShape(tokens, tokens, model.recompute, dropout=dropout)
    return micro_batch_bytes(model.costs, base, sites.values(), batch).peak


def _halves(most: int, least: int) -> tuple[int, ...]:
    """`most`, its half, and so on; `least` last."""
    found = []
    while most > least:
        found.append(most)
        most //= 2
    return (*found, least)
