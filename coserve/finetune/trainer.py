"""The engine's fine-tuning side: starts jobs, advances them by slices, keeps checkpoints, publishes what they learn."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from coserve.adapter_store.files import load_adapter, save_adapter
from coserve.adapter_store.host import Residency
from coserve.cancellation import Cancellation
from coserve.corpus.batch_plan import BatchPlan
from coserve.corpus.tokenized import Corpus
from coserve.errors import (
    AdapterNotFound,
    CapacityError,
    CheckpointUnreadable,
    CoserveError,
    JobOutOfMemory,
    NonFiniteLoss,
    StorageError,
    StorageFull,
)
from coserve.finetune.checkpoint import Checkpoint, load_checkpoint, prune, save_checkpoint
from coserve.finetune.init import new_adapter
from coserve.finetune.optim import Learner, cast, named_tensors
from coserve.finetune.run import Progress, Run
from coserve.finetune.step import Stepper
from coserve.kernels.lora.backend import Way
from coserve.link import FromEngine, JobCheckpoint, JobFailed, JobProgress, JobStarted, JobSucceeded, JobWaiting
from coserve.model.base import Base
from coserve.model.faults import contained
from coserve.model.lora import LoraWeights
from coserve.state.durable import disk_errors, replace_dir
from coserve.state.failpoints import failpoint
from coserve.state.folder import DataFolder
from coserve.types import AdapterRef, JobSpec, MicroStep

log = logging.getLogger(__name__)

BEST = "best/"
"""Prefix of the best evaluation's weights in a checkpoint."""


class Trainer:
    """All jobs of one engine. Each has its own adapter, optimizer, schedule and seed; they share the base.

    Jobs alternate at the ends of micro-batches; what a job computes does not depend on what runs in between.
    """

    def __init__(
        self,
        base: Base,
        residency: Residency,
        folder: DataFolder,
        *,
        micro_batch_tokens: int,
        recompute: bool,
        keep_checkpoints: int,
        way: Way,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`micro_batch_tokens`: the most tokens of one forward, whatever a job asks for. `clock` gives seconds.

        Raises `UnsupportedBase` for a base that cannot be run layer by layer.
        """
        self._base, self._residency, self._folder, self._way = base, residency, folder, way
        self._micro_batch_tokens, self._keep, self._clock = micro_batch_tokens, keep_checkpoints, clock
        self._stepper = Stepper(base, recompute=recompute)
        self._runs: dict[str, Run] = {}
        self._saved: dict[str, Progress] = {}
        self.micro_steps_done = 0
        """In the last slice."""

    def load(self, spec: JobSpec, cancellation: Cancellation) -> Callable[[], JobStarted]:
        """Everything that a job needs in memory, as its last readable checkpoint left it; on any thread.

        Call the returned function on the event-loop thread to commit the load. Raises `Cancelled`, `CheckpointUnreadable`
        (its corpus), `AdapterNotFound` (what it continues), `InvalidRequest` (settings that don't fit the base),
        `JobOutOfMemory`.
        """
        with self._own_errors():
            run, saved = self._load(spec, cancellation.check)

        def start() -> JobStarted:
            assert spec.id not in self._runs, f"job {spec.id} runs already"
            self._runs[spec.id] = run
            if saved is not None:
                self._saved[spec.id] = saved
            return JobStarted(id=spec.id, total_steps=run.plan.total_steps, resumed_from=run.progress.step)

        return start

    def preparation(self, job: str) -> Callable[[Cancellation], None] | None:
        """What has to be done on a thread before the job goes on; it is not to be advanced meanwhile. Mostly None."""
        run = self._runs[job]
        step = run.progress.step
        if run.mid_step or run.plan.prepared(step):
            return None
        return lambda cancellation: run.plan.prepare(step, cancellation.check)

    def advance(self, job: str, micro_steps: int | None) -> list[FromEngine]:
        """One slice: `micro_steps` micro-steps (layers forward or backward, parts of the head), fewer if one of another kind comes
        next; or None: to the micro-batch's end.

        The optimizer step, an evaluation's end, a checkpoint and the publication belong to the micro-step before them.
        """
        run = self._runs[job]
        self.micro_steps_done = 0  # also where the slice fails: its time says nothing of micro-steps
        messages: list[FromEngine] = []
        try:
            with self._own_errors():
                metrics = run.advance(micro_steps)
                self.micro_steps_done = run.micro_steps_done
                if metrics is not None:
                    messages.append(JobProgress(id=job, metrics=metrics))
                if run.finished:
                    messages.append(self._publish_if_it_fits(run))
                elif metrics is not None and metrics.step % run.spec.training.checkpoint_steps == 0:
                    messages += self._checkpoint_on_the_way(run)
        except CoserveError as error:
            messages.append(JobFailed(id=job, code=error.code, message=error.message))
        return messages

    def mid_batch(self, job: str) -> bool:
        """A micro-batch of the job is suspended."""
        return self._runs[job].mid_batch

    def next_micro_step(self, job: str) -> MicroStep:
        """The kind of the micro-step that the job's next slice begins with."""
        return self._runs[job].next_micro_step

    def checkpoint(self, job: str) -> JobCheckpoint | None:
        """At a pause or the end: gives up the optimizer step under way and saves the state after the last one.

        None if that is on disk already. Raises `StorageFull`, `StorageFailed`.
        """
        run = self._runs[job]
        with self._own_errors():
            run.abandon()
            return self._save(run)

    def drop(self, job: str) -> None:
        """Forget the job; its files stay."""
        run = self._runs.pop(job)
        self._saved.pop(job, None)
        with self._own_errors():
            run.abandon()

    def _load(self, spec: JobSpec, check: Callable[[], None]) -> tuple[Run, Progress | None]:
        """The job, and the progress of the checkpoint that it goes on from."""
        base = self._base
        corpus = Corpus.load(self._folder.corpus(spec.id), check)
        if int(corpus.tokens.max()) >= base.spec.vocab:
            raise CheckpointUnreadable("the job's corpus has tokens that the base does not know")
        plan = BatchPlan(corpus.lengths, spec.training, self._micro_batch_tokens, check)
        learner = Learner(self._first_weights(spec), base.spec, spec.training, base.dtype)
        run = Run(spec, corpus, plan, learner, self._stepper, way=self._way, device=base.device, clock=self._clock)
        check()
        saved = self._resume(run)
        if run.progress.step < plan.total_steps:
            plan.prepare(run.progress.step, check)
        return run, saved

    def _first_weights(self, spec: JobSpec) -> LoraWeights:
        """fp32: those of a new adapter, or the continued one's own from its files, which a 16-bit base rounds."""
        where, dtype = self._base.device, torch.float32
        if spec.init_from is None:
            return new_adapter(spec.lora, self._base.spec, seed=spec.training.seed, dtype=dtype, device=where)
        path = self._folder.adapter(spec.init_from)
        if not path.is_dir():
            raise AdapterNotFound(f"no adapter {str(spec.init_from)!r}", field="continue_from")
        return load_adapter(path, self._base.spec, device=where, dtype=dtype, digests=spec.init_digests)

    def _resume(self, run: Run) -> Progress | None:
        """Take over the last checkpoint that can be read, and return its progress; without one the job starts from its
        beginning."""
        spec = run.spec
        for step, path in reversed(self._folder.checkpoints(spec.id)):
            try:
                found = load_checkpoint(path, spec, self._base.spec)
                best = self._best(run, found)
                run.learner.restore(found.tensors, steps=found.progress.step)
            except CheckpointUnreadable as error:
                log.warning("job %s: checkpoint %d left aside: %s", spec.id, step, error.message)
                continue
            run.progress, run.best = found.progress, best
            return found.progress
        return None

    def _best(self, run: Run, found: Checkpoint) -> LoraWeights | None:
        tensors = {
            n.removeprefix(BEST): t.to(self._base.device) for n, t in found.tensors.items() if n.startswith(BEST)
        }
        return run.learner.adapter(tensors) if tensors else None

    def _checkpoint_on_the_way(self, run: Run) -> list[FromEngine]:
        """A disk that is full now costs the job this checkpoint, not its life."""
        try:
            saved = self._save(run)
        except CapacityError as error:
            log.warning("job %s: no checkpoint at step %d: %s", run.spec.id, run.progress.step, error.message)
            return []
        return [] if saved is None else [saved]

    def _save(self, run: Run) -> JobCheckpoint | None:
        spec, progress = run.spec, run.progress
        if progress.step == 0 or self._saved.get(spec.id) == progress:
            return None
        tensors = run.learner.state()
        if run.best is not None:
            tensors |= {BEST + name: tensor.cpu() for name, tensor in named_tensors(run.best)}
        save_checkpoint(self._folder, spec, self._base.spec, progress, tensors)
        self._saved[spec.id] = progress
        prune(self._folder, spec.id, self._keep)
        return JobCheckpoint(id=spec.id, step=progress.step)

    def _publish_if_it_fits(self, run: Run) -> JobSucceeded | JobWaiting:
        """A disk that is full costs the job time, not its life: the next slice tries again."""
        try:
            return self._publish(run)
        except StorageError as error:
            what = "space" if isinstance(error, StorageFull) else "the disk"
            return JobWaiting(id=run.spec.id, message=f"waiting for {what}: {error.message}")

    def _publish(self, run: Run) -> JobSucceeded:
        """Files first, durably; then memory, where every later request finds the version."""
        spec, weights = run.spec, run.final_weights()
        if not all(bool(torch.isfinite(tensor).all()) for _, tensor in named_tensors(weights)):
            raise NonFiniteLoss("the adapter's weights are not finite; try a lower learning rate")
        ref = AdapterRef(spec.adapter, spec.version)
        with replace_dir(self._folder.adapter(ref), point="adapter") as beside:
            save_adapter(beside, weights, self._base.spec)
        with disk_errors():
            failpoint("adapter.publish")
        self._residency.publish(ref, cast(weights, self._base.dtype))
        loss = run.progress.last_loss
        assert loss is not None, "a job ends after at least one step"
        return JobSucceeded(id=spec.id, ref=ref, final_loss=loss, trained_tokens=run.progress.trained_tokens)

    @contextmanager
    def _own_errors(self) -> Iterator[None]:
        """Errors inside are the job's own: see `contained`."""
        with contained(self._base.device):
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise JobOutOfMemory("not enough GPU memory; try fewer micro_batch_tokens or a smaller rank") from error
            except MemoryError as error:
                raise JobOutOfMemory("not enough memory") from error
