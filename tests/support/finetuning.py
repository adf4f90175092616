"""Small jobs on tiny random bases."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from coserve.core.cancellation import Cancellation
from coserve.core.errors import CapacityError, CoserveError
from coserve.core.link.jobs import JobCheckpoint, JobFailed, JobNote, JobProgress, JobStarted, JobSucceeded
from coserve.core.link.link import FromEngine
from coserve.core.training.jobs import JobSpec
from coserve.core.training.settings import TrainingSettings
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import AdapterDigests, AdapterRef, LoraSettings
from coserve.data.corpus.batch import corpus_batch
from coserve.data.corpus.batch_plan import MAX_ROWS_ON_TICK
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.init import new_adapter
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.memory_limits import BatchLimits
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows, pack_jobs
from coserve.finetune.sessions.followed import FollowedSessions
from coserve.finetune.sessions.sessions import TrainerSettings
from coserve.finetune.trainer import Trainer
from coserve.kernels.lora.interface import LoraBackend
from coserve.lora.store.files import load_adapter
from coserve.lora.store.store import AdapterStore
from coserve.model.base import Base, wrap_base
from coserve.model.lora import LoraWeights
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.queues.finetune import JobQueue
from coserve.state.folder import DataFolder
from tests.support.lora_backends import GROUPED
from tests.support.records import make_spec
from tests.support.tiny_models import VOCAB, tiny_model

T = TypeVar("T")
CPU = torch.device("cpu")
SETTINGS = LoraSettings(r=4, alpha=8)


def tiny_base(family: str) -> Base:
    return wrap_base(tiny_model(family), name=family)


def random_corpus(seed: int = 0, lengths: Sequence[int] = (9, 5, 12, 3, 7, 8), learned: float = 0.6) -> Corpus:
    """Rows of random tokens, about `learned` of them targets, at least the last."""
    random = np.random.default_rng(seed)
    bounds = np.cumsum([0, *lengths]).astype(np.int64)
    tokens = random.integers(3, VOCAB, bounds[-1]).astype(np.int32)
    target = (random.random(bounds[-1]) < learned).astype(np.uint8)
    target[bounds[1:] - 1] = 1
    target[bounds[:-1]] = 0
    return Corpus(tokens, target, bounds)


def pack_rows(corpus: Corpus, rows: Sequence[int], device: torch.device) -> PackedRows:
    """Rows of a corpus, given by index, as one job's batch."""
    return pack_jobs([corpus_batch(corpus, rows)], device)


def random_pairs(seed: int = 0, rows: int = 5) -> Corpus:
    """Pairs: the same prompt of random tokens before two answers, of other lengths."""
    random = np.random.default_rng(seed)
    tokens, target, splits, bounds = [], [], [], [0]
    for _ in range(rows):
        prompt, answers = random.integers(3, VOCAB, random.integers(2, 5)), random.integers(1, 5, 2)
        for length in answers:
            tokens += [*prompt, *random.integers(3, VOCAB, length)]
            target += [0] * len(prompt) + [1] * int(length)
        splits.append(bounds[-1] + len(prompt) + int(answers[0]))
        bounds.append(len(tokens))
    return Corpus(
        np.array(tokens, np.int32), np.array(target, np.uint8), np.array(bounds, np.int64), np.array(splits, np.int64)
    )


def random_labels(rows: int = 6) -> Corpus:
    """Prompts of random tokens, and answers of which every other one is undesirable."""
    random, found = np.random.default_rng(0), list[tuple[list[int], list[int]]]()
    for row in range(rows):
        prompt, answer = random.integers(2, 5), random.integers(1, 5)
        tokens = random.integers(3, VOCAB, prompt + answer).tolist()
        found.append((tokens, [0] * prompt + [1 + row % 2] * answer))
    bounds = np.cumsum([0, *(len(tokens) for tokens, _ in found)], dtype=np.int64)
    tokens, target = ([one for row in found for one in row[part]] for part in (0, 1))
    return Corpus(np.array(tokens, np.int32), np.array(target, np.uint8), bounds)


def job_spec(corpus: Corpus, id: str = "job-1", **changes: object) -> JobSpec:
    """A job of four steps; `changes` replace fields of the spec, of `lora` or of `training`."""
    own_fields = ("adapter", "version", "init_from", "teacher")
    lora = LoraSettings(r=4)
    training = TrainingSettings(steps=4, batch_tokens=24, micro_batch_tokens=16, learning_rate=0.01, seed=7)
    for name, value in changes.items():
        if name in LoraSettings.__struct_fields__:
            lora = msgspec.structs.replace(lora, **{name: value})
        elif name in TrainingSettings.__struct_fields__:
            training = msgspec.structs.replace(training, **{name: value})
        else:
            assert name in own_fields, name
    own = {name: value for name, value in changes.items() if name in own_fields}
    spec = make_spec(
        id,
        "learned",
        lora=lora,
        training=training,
        rows=corpus.rows,
        tokens=len(corpus.tokens),
        target_tokens=corpus.target_tokens,
    )
    return msgspec.structs.replace(spec, **own)


def changing_adapter(
    base: Base, settings: LoraSettings = SETTINGS, *, seed: int = 3, scale: float = 0.1
) -> LoraWeights:
    """An adapter that changes the outputs: its B is not zero, so that A has gradients too."""
    weights = base.begun(new_adapter(settings, base.spec, seed=seed, dtype=torch.float32, device="cpu"))
    generator = torch.Generator().manual_seed(5)
    sites = {
        site: replace(
            pair,
            b_OR=torch.randn(pair.b_OR.shape, generator=generator) * scale,
            magnitude_O=None if pair.magnitude_O is None else pair.magnitude_O * 1.3,
        )
        for site, pair in weights.sites.items()
    }
    return LoraWeights(settings, sites)


def started(
    base: Base, settings: LoraSettings = SETTINGS, training: TrainingSettings | None = None
) -> AdapterOptimizer:
    start = changing_adapter(base, settings)
    return AdapterOptimizer(start, base.spec, training or TrainingSettings(), base.dtype, row_norms=base.row_norms)


def gradient_sums(optimizer: AdapterOptimizer) -> dict[str, Tensor]:
    """What backwards have added up, named as by `named_tensors`."""
    found = {}
    for site, pair in optimizer.weights().sites.items():
        assert pair.main_grads is not None
        found |= {f"{site}.a": pair.main_grads.a_RD, f"{site}.b": pair.main_grads.b_OR}
    return found


def alive(kind: type[T]) -> list[T]:
    """All instances that memory is held for."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is kind]


class Bench:
    """A trainer over a data folder, as the engine has it."""

    def __init__(
        self,
        base: Base,
        root: Path,
        *,
        recompute: bool = False,
        keep_checkpoints: int = 2,
        lora_backend: LoraBackend = GROUPED,
        clock: Callable[[], float] = lambda: 0.0,
        own_stream: Callable[[], AbstractContextManager[object]] | None = None,
        limits: BatchLimits = BatchLimits(64),  # noqa: B008 - frozen
        compiled: CompiledLayers | None = None,
        graphs: LayerGraphs | None = None,
        rows_on_tick: int = MAX_ROWS_ON_TICK,
        make_optimizer: Callable[..., AdapterOptimizer] = AdapterOptimizer,
        kind: Callable[[Base, AdapterStore, DataFolder, TrainerSettings], Trainer] = Trainer,
    ) -> None:
        self.base, self.folder = base, DataFolder(root)
        self.store = AdapterStore(self._load_adapter, 1 << 40)
        self.settings = TrainerSettings(
            limits=limits,
            mix_jobs=True,
            recompute=recompute,
            keep_checkpoints=keep_checkpoints,
            lora_backend=lora_backend,
            clock=clock,
            own_stream=own_stream,
            compiled=compiled,
            graphs=graphs,
            rows_on_tick=rows_on_tick,
            make_optimizer=make_optimizer,
        )
        self.trainer = kind(base, self.store, self.folder, self.settings)

    def followed(self) -> FollowedSessions:
        """The sessions of a follower rank over the same files."""
        return FollowedSessions(self.base, self.store, self.folder, self.settings)

    def _load_adapter(self, ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        found = load_adapter(self.folder.adapter(ref), self.base.spec, dtype=self.base.dtype)
        return LoraWeights(found.settings, {site: pair.to(self.base.device) for site, pair in found.sites.items()})

    def in_memory(self, ref: AdapterRef) -> bool:
        return self.store.state(ref).in_memory

    def place(self, corpus: Corpus, spec: JobSpec) -> JobSpec:
        corpus.save(self.folder.corpus(spec.id))
        return spec

    def run(
        self, job: str, *, micro_steps: int | None = None, until: Callable[[FromEngine], bool] = lambda message: False
    ) -> list[FromEngine]:
        """Slices of `micro_steps` until the job ends, or a message satisfies `until`."""
        messages: list[FromEngine] = []
        while not messages or not (isinstance(messages[-1], JobSucceeded | JobFailed) or any(map(until, messages))):
            messages += self.advance(job, micro_steps)
        return messages

    def advance(
        self, job: str, micro_steps: int | None, others: Sequence[str] = (), shared_tokens: int | None = None
    ) -> list[FromEngine]:
        """A slice, and what the engine has threads do after it, on this one."""
        messages = self.trainer.advance(job, micro_steps, others, shared_tokens)
        for trained in self.trainer.trained:
            try:
                if not self.trainer.mid_batch(trained) and self.trainer.finished(trained):
                    messages.append(self.trainer.publication(trained)()())
                elif self.trainer.checkpoint_due(trained):
                    with suppress(CapacityError):
                        messages.append(self.save(trained))
            except CoserveError as error:
                messages.append(JobFailed(id=trained, code=error.code, message=error.message))
        return messages

    def save(self, job: str) -> JobCheckpoint | None:
        """A checkpoint, written at once."""
        write = self.trainer.checkpoint(job)
        return None if write is None else write()

    def start(self, spec: JobSpec) -> JobStarted:
        return self.trainer.load(spec, Cancellation())()

    def train(self, spec: JobSpec, *, micro_steps: int | None = None) -> list[FromEngine]:
        self.start(spec)
        messages = self.run(spec.id, micro_steps=micro_steps)
        self.trainer.drop(spec.id)
        return messages


def metrics_of(messages: Sequence[FromEngine]) -> list[StepMetrics]:
    return [message.metrics for message in messages if isinstance(message, JobProgress)]


def train_together(
    bench: Bench,
    specs: Sequence[JobSpec],
    *,
    micro_steps: int | None = None,
    between: Callable[[JobQueue], None] = lambda queue: None,
) -> dict[str, list[FromEngine]]:
    """Each job's messages. The jobs, which have started, share micro-batches where they can, and take turns as in the
    engine, until all have ended. `between` is called after each slice, and may take jobs out of the queue."""
    queue, found = JobQueue(), dict[str, list[FromEngine]]()
    for spec in specs:
        queue.add(spec.id)
        found[spec.id] = []
    while len(queue):
        leader = queue.ready()[0]
        for message in bench.advance(leader, micro_steps, queue.ready()):
            assert isinstance(message, JobCheckpoint | JobFailed | JobNote | JobProgress | JobSucceeded), message
            found[message.id].append(message)
            if isinstance(message, JobFailed | JobSucceeded):
                queue.remove(message.id)
                bench.trainer.drop(message.id)
        trained = [job for job in bench.trainer.trained if job in queue]
        if any(map(bench.trainer.mid_batch, trained)):
            queue.put_first(trained)
        else:
            for job in trained:
                queue.rotate(job)
        between(queue)
    return found
