"""Fine-tuning of figure 5.1 as the daemon runs it: its trainer, with rows of several jobs in one batch, the loss in chunks, clipping and AdamW.

Each adapter is a job on random rows, which takes optimizer steps of its share of the batch: one row, or more where there are fewer adapters than
sequences. A batch has as many jobs as fit, in turn. The paper draws each sequence's adapter.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coserve.adapter_store.host import HostBudget
from coserve.adapter_store.store import AdapterStore
from coserve.cancellation import Cancellation
from coserve.config import Config
from coserve.corpus.tokenized import Corpus
from coserve.engine.parts import EngineParts
from coserve.link import JobProgress
from coserve.model.base import Base
from coserve.types import JobSpec, LoraSettings, TrainingSettings

TARGETS = ("c_attn", "c_proj")
STEPS = 100_000
"""Of a job: more than are measured."""


def job_spec(job: int, rank: int, corpus: Corpus, rows: int, length: int) -> JobSpec:
    """A job that takes steps of `rows` rows."""
    training = TrainingSettings(
        steps=STEPS, batch_tokens=rows * length, max_length=length, checkpoint_steps=STEPS, seed=job
    )
    return JobSpec(
        id=f"j{job:02d}",
        adapter=f"a{job:02d}",
        version=1,
        init_from=None,
        lora=LoraSettings(r=rank, targets=TARGETS),
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


class Jobs:
    """The trainer with a job for each adapter, over a data folder of its own."""

    def __init__(self, base: Base, root: Path, backend: str, *, length: int, batch: int, ranks: list[int]) -> None:
        """`ranks`: of each adapter. `batch`: sequences of one forward."""
        settings: dict[str, Any] = {"lora_backend": backend, "micro_batch_tokens": batch * length}
        parts = EngineParts(base, Config(data_dir=root, **settings))
        self._trainer = parts.make_trainer(AdapterStore(parts.read_adapter, HostBudget(1)))
        self._wanted = batch * length
        self.jobs_of_batches = set[int]()
        """How many jobs the batches had."""
        rows = -(-batch // len(ranks))
        self._turns = deque[str]()
        for job, rank in enumerate(ranks):
            corpus = random_corpus(base.spec.vocab, 4 * rows, length, job)
            spec = job_spec(job, rank, corpus, rows, length)
            corpus.save(parts.folder.corpus(spec.id))
            self._trainer.load(spec, Cancellation())()
            self._turns.append(spec.id)

    def train(self, run: int) -> int:
        """One batch, or more where jobs' whole steps fill at most half of it; returns the tokens of the optimizer steps."""
        tokens = 0
        while tokens < self._wanted // 2 + 1:
            tokens += self._pass()
        return tokens

    def _pass(self) -> int:
        for job in self._turns:
            if (prepare := self._trainer.preparation(job)) is not None:
                prepare(Cancellation())
        messages = self._trainer.advance(self._turns[0], None, tuple(self._turns))
        self.jobs_of_batches.add(len(self._trainer.trained))
        for job in self._trainer.trained:
            self._turns.remove(job)
            self._turns.append(job)
        found = 0
        for message in messages:
            assert isinstance(message, JobProgress), message
            found += message.metrics.tokens
        return found

    def close(self) -> None:
        """Free the jobs' memory."""
        for job in self._turns:
            self._trainer.drop(job)


@contextlib.contextmanager
def trained_jobs(base: Base, backend: str, *, length: int, batch: int, ranks: list[int]) -> Iterator[Jobs]:
    """The jobs, with their files in a folder of the system's."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(base, Path(folder), backend, length=length, batch=batch, ranks=ranks)
        try:
            yield jobs
        finally:
            jobs.close()
