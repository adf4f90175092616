"""Fine-tuning of figure 5.1 as the daemon runs it: its trainer, with rows of several jobs in one batch, the loss in
chunks, clipping and AdamW.

Each adapter is a job on random rows, which takes optimizer steps of its share of the batch: one row, or more where
there are fewer adapters than sequences. A batch has as many jobs as fit, in turn. The paper draws each sequence's
adapter.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np
from torch import nn

from coserve.admission.recompute_plan import RecomputePlan
from coserve.config import Config
from coserve.core.cancellation import Cancellation
from coserve.core.errors import JobOutOfMemory, UnsupportedBase
from coserve.core.gpu_memory import Kept
from coserve.core.link.jobs import JobFailed, JobNote, JobProgress
from coserve.core.link.link import FromEngine
from coserve.core.training.jobs import JobSpec
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.data.corpus.tokenized import Corpus
from coserve.engine.parts import EngineParts
from coserve.finetune.trainer import Trainer
from coserve.lora.store.store import AdapterStore
from coserve.model.base import Base
from coserve.model.training.compiled_layers import CompiledLayers

TARGETS = ("c_attn", "c_proj")
STEPS = 100_000
"""Of a job: more than are measured."""


class TooLittleMemory(Exception):
    """The trainer failed for lack of memory, or went on with smaller micro-batches than it was meant to have."""


def training_settings(job: int, rows: int, length: int) -> TrainingSettings:
    """Of a job that takes steps of `rows` rows."""
    return TrainingSettings(
        steps=STEPS, batch_tokens=rows * length, max_length=length, checkpoint_steps=STEPS, seed=job
    )


def job_spec(
    job: int, rank: int, corpus: Corpus, rows: int, length: int, targets: tuple[str, ...] = TARGETS
) -> JobSpec:
    """A job that takes steps of `rows` rows."""
    training = training_settings(job, rows, length)
    return JobSpec(
        id=f"j{job:02d}",
        adapter=f"a{job:02d}",
        version=1,
        init_from=None,
        lora=LoraSettings(r=rank, targets=targets),
        training=training,
        rows=corpus.rows,
        tokens=len(corpus.tokens),
        target_tokens=corpus.target_tokens,
    )


def random_corpus(vocab: int, rows: int, length: int, seed: int) -> Corpus:
    """Rows of one length, all of whose tokens but the first are learned."""
    tokens = np.random.default_rng(seed).integers(0, vocab, rows * length).astype(np.int32)
    bounds = np.arange(0, rows * length + 1, length, dtype=np.int64)
    target = np.ones(rows * length, np.uint8)
    target[bounds[:-1]] = 0
    return Corpus(tokens, target, bounds)


_COMPILED = WeakKeyDictionary[nn.Module, CompiledLayers]()


def _compiled(parts: EngineParts, *, levels: bool) -> CompiledLayers | None:
    """The base's layers, compiled once for all trainers, with `levels` those that keep less, too; None where the daemon
    would not compile them."""
    model = parts.base.model
    try:
        if model not in _COMPILED and parts.config.compile != "off":
            layers = parts.training_layers()
            layers.compile()
            _COMPILED[model] = layers
        if levels and model in _COMPILED and Kept.INPUT not in _COMPILED[model].cuts:
            _COMPILED[model].compile_levels()
    except UnsupportedBase as error:
        print(f"training layers are not compiled: {error}", flush=True)
        return None
    return None if parts.config.compile == "off" else _COMPILED.get(model)


def forget_compiled() -> None:
    """Free the compiled layers, which hold their bases."""
    _COMPILED.clear()


class Jobs:
    """The trainer with a job for each adapter, over a data folder of its own; a context, which frees both."""

    def __init__(
        self,
        base: Base,
        backend: str,
        *,
        length: int,
        batch: int,
        ranks: Sequence[int],
        rows: int | None = None,
        targets: tuple[str, ...] = TARGETS,
        recomputed: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`ranks`: of each adapter. `batch`: sequences of one forward. `rows` of a job's step; None: the job's share of
        the batch.
        `recomputed`: layers that the memory plan has computed again. `settings`: further ones of the daemon."""
        self._folder = tempfile.TemporaryDirectory()
        own: dict[str, Any] = {"lora_backend": backend, "micro_batch_tokens": batch * length, **(settings or {})}
        parts = EngineParts(base, Config(data_dir=Path(self._folder.name), **own))
        compiled = _compiled(parts, levels=recomputed > 0)
        self.layers = "operation by operation" if compiled is None else "compiled"
        self._trainer = parts.make_sessions(
            Trainer,
            AdapterStore(parts.read_adapter, budget := parts.host_budget(), memory=parts.host_memory(budget)),
            compiled=compiled,
        )
        self._told_before = self._trainer.notes  # of the base, whatever is trained
        self._wanted = batch * length
        self.jobs_of_batches = set[int]()
        """How many jobs the batches had."""
        rows = rows or -(-batch // len(ranks))
        self._turns = deque[str]()
        for job, rank in enumerate(ranks):
            corpus = random_corpus(base.spec.vocab, 4 * rows, length, job)
            spec = job_spec(job, rank, corpus, rows, length, targets)
            corpus.save(parts.folder.corpus(spec.id))
            self._trainer.load(spec, Cancellation())()
            self._trainer.limit(spec.id, RecomputePlan(batch * length, recomputed))
            self._turns.append(spec.id)

    def train(self, run: int) -> int:
        """One batch, or more where jobs' whole steps fill at most half of it; returns the tokens of the optimizer
        steps.

        Raises `TooLittleMemory`.
        """
        tokens = 0
        while tokens < self._wanted // 2 + 1:
            self._prepare()
            tokens += self._told(self._trainer.advance(self._turns[0], None, tuple(self._turns)))
            self._turn()
        return tokens

    def slices(self, micro_steps: int) -> Iterator[MicroStep]:
        """What `train` does, in slices of at most so many micro-steps of one kind; yields each slice's kind ahead of
        it.

        Raises `TooLittleMemory`.
        """
        tokens = 0
        while tokens < self._wanted // 2 + 1:
            self._prepare()
            first, others = self._turns[0], tuple(self._turns)
            suspended = True
            while suspended:
                yield self._trainer.next_micro_step(first)
                tokens += self._told(self._trainer.advance(first, micro_steps, others))
                suspended = self._trainer.mid_batch(first)
            self._turn()

    def _prepare(self) -> None:
        for job in self._turns:
            if (prepare := self._trainer.preparation(job)) is not None:
                prepare(Cancellation())

    def _turn(self) -> None:
        """The next batch begins with other jobs."""
        self.jobs_of_batches.add(len(self._trainer.trained))
        for job in self._trainer.trained:
            self._turns.remove(job)
            self._turns.append(job)

    def _told(self, messages: Sequence[FromEngine]) -> int:
        """Tokens of the optimizer steps that these tell of."""
        found = 0
        for message in messages:
            if isinstance(message, JobNote) or (isinstance(message, JobFailed) and message.code == JobOutOfMemory.code):
                raise TooLittleMemory(message.message)
            assert isinstance(message, JobProgress), message
            found += message.metrics.tokens
        if new := [note for note in self._trainer.notes if note not in self._told_before]:
            raise TooLittleMemory("; ".join(new))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._turns:
            self._trainer.drop(job)
        self._folder.cleanup()
