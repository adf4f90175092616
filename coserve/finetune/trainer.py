"""The engine's fine-tuning side: loads jobs, advances them in slices, saves checkpoints, publishes adapters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count

from coserve.admission.optimizers import check_optimizer
from coserve.admission.treatment import Treatment, has_reference
from coserve.core.cancellation import Cancellation
from coserve.core.errors import (
    CheckpointUnreadable,
    EngineFault,
    InvalidRequest,
    JobOutOfMemory,
)
from coserve.core.gpu_memory import TrainingCosts
from coserve.core.link import FromEngine, JobCheckpoint, JobNote, JobSnapshot, TrainingBatches
from coserve.core.step_metrics import StepMetrics
from coserve.core.types import AdapterRef, JobSpec, MicroStep
from coserve.data.corpus.batch_plan import MAX_ROWS_ON_TICK, BatchPlan
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.init import initial_weights, published_adapter
from coserve.finetune.job import LoadedJob, TrainingJob
from coserve.finetune.job_checkpoint import JobCheckpoints
from coserve.finetune.layers.compiled import uncompiled
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.loop import TrainingLoop
from coserve.finetune.lora_tensors import cast, cast_learning
from coserve.finetune.losses.loss import Loss
from coserve.finetune.micro_batch import MicroBatchRunner
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.outcome import PEER_FAILED, Outcome, Retry
from coserve.finetune.passes.mixing import BatchLimits
from coserve.finetune.passes.passes import TrainingPasses
from coserve.finetune.passes.training_pass import TrainingPass
from coserve.finetune.publication import Published, Snapshot, publication, snapshot
from coserve.finetune.session import SliceTimer, TrainingSession
from coserve.kernels.lora.interface import LoraBackend
from coserve.lora.store.store import AdapterStore
from coserve.model.base import Base
from coserve.model.faults import contained, memory_numbers, out_of_memory
from coserve.model.lora import KeptLora, LoraWeights
from coserve.model.parallel.guard import NoPeers, aborting_on_error
from coserve.model.parallel.lockstep import PeerFailed
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.state.folder import DataFolder


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    limits: BatchLimits
    """Limits of one forward, whatever a job requests."""
    mix_jobs: bool
    """Whether jobs may share a forward. Ignored with tensor parallelism, or if the LoRA backend computes one adapter at
    a time."""
    recompute: bool
    keep_checkpoints: int
    lora_backend: LoraBackend
    clock: Callable[[], float] = time.perf_counter
    """Returns seconds."""
    own_stream: Callable[[], AbstractContextManager[object]] | None = None
    """Enters the stream of all training tensors and kernels. Slices are then only launched there, overlapped with
    generation. None: slices run on the current stream, and have ended when `advance` returns."""
    compiled: CompiledLayers | None = None
    """`compiled`, `graphs`: see `MicroBatchRunner`."""
    graphs: LayerGraphs | None = None
    rows_on_tick: int = MAX_ROWS_ON_TICK
    """See `BatchPlan`."""
    make_optimizer: Callable[..., AdapterOptimizer] = AdapterOptimizer


class Trainer:
    """All jobs of one engine. Each has its own adapter, optimizer, schedule and seed; they share the base.

    Jobs alternate at the ends of micro-batches, or share a `TrainingPass`. Work in between does not change a job's
    result, and sharing a pass changes it only by rounding.
    """

    def __init__(self, base: Base, store: AdapterStore, folder: DataFolder, settings: TrainerSettings) -> None:
        """Raises `UnsupportedBase` for a base that cannot run layer by layer."""
        self._base, self._store, self._folder, self._settings = base, store, folder, settings
        limits, lora_backend = settings.limits, settings.lora_backend
        self._make_plan = partial(BatchPlan, micro_batch_rows=limits.rows, rows_on_tick=settings.rows_on_tick)
        self._guard = NoPeers() if base.sharding is None else base.sharding.mesh.guard
        self._stream, self._overlapped = settings.own_stream or nullcontext, settings.own_stream is not None
        self._compiled, self._graphs, self._kept = settings.compiled, settings.graphs, KeptLora()
        runner = MicroBatchRunner(base, recompute=settings.recompute, compiled=self._compiled, graphs=self._graphs)
        self._passes = TrainingPasses(
            lambda jobs: TrainingPass(
                jobs, runner, lora_backend, base.device, overlapped=self._overlapped, kept=self._kept
            ),
            limits,
            mix_jobs=settings.mix_jobs and base.sharding is None and not lora_backend.one_adapter_a_step,
            graphs=self._graphs,
        )
        self._jobs: dict[str, TrainingJob] = {}
        self._snapshot_numbers = count(1)
        """Each snapshot has its own version, so that prefix-cache entries of other weights are never reused."""
        self.micro_steps_done = 0
        """Micro-steps done in the last slice."""
        self.trained: tuple[str, ...] = ()
        """Jobs in the last slice."""

    def load(self, spec: JobSpec, cancellation: Cancellation) -> LoadedJob:
        """Load a job into memory from its last readable checkpoint; on any thread.

        Raises `Cancelled`, `CheckpointUnreadable` (its corpus), `AdapterNotFound` (the adapter it continues, or its
        teacher), `InvalidRequest` (settings that do not fit the base), `JobOutOfMemory`.
        """
        with self._job_errors():
            job = self._load(spec, cancellation.check)

        def commit() -> None:
            assert spec.id not in self._jobs, f"job {spec.id} runs already"
            self._jobs[spec.id] = job

        return LoadedJob(job.checkpoints.started(), commit)

    def preparation(self, job: str) -> Callable[[Cancellation], None] | None:
        """Return work for a worker thread that must precede the next `advance`; usually None. The job must not be
        advanced meanwhile."""
        training = self._jobs[job]
        plan, step = training.loop.plan, training.loop.progress.step
        done = training.mid_step or plan.prepared(step)
        return None if done else lambda cancellation: plan.prepare(step, cancellation.check)

    def advance(
        self, job: str, micro_steps: int | None, others: Sequence[str] = (), shared_tokens: int | None = None
    ) -> list[FromEngine]:
        """Run one slice of the job's micro-batch: see `TrainingPasses.advance`. Does nothing for a finished job.

        When a micro-batch begins, jobs of `others` may join it: they are between two micro-batches, in scheduling
        order, and all together have at most `shared_tokens` tokens.
        """
        self.micro_steps_done, self.trained = 0, (job,)  # stays 0 if the slice fails: its time is then not learned
        if (one := self._passes.pass_of(self._jobs[job], [self._jobs[each] for each in others], shared_tokens)) is None:
            return []
        self.trained = tuple([each.id for each in one.jobs])
        with self._stream():
            messages = self._passes.advance(one, micro_steps)
        self.micro_steps_done = one.micro_steps_done
        return messages

    def attempt(self, job: str, micro_steps: int | None) -> Outcome:
        """Run `advance` on one of several ranks. On return no rank is in a collective of the slice, whichever rank
        failed.

        After an error the unfinished optimizer step is dropped. `outcome.judge` decides from the outcomes of all ranks.
        Raises only `EngineFault`.
        """
        training, guard = self._jobs[job], self._guard
        self.micro_steps_done, self.trained = 0, (job,)
        one = self._passes.pass_of(training)
        code = message = ""
        metrics: StepMetrics | None = None
        guard.begin(self._base.device)
        try:
            with contained(self._base.device), aborting_on_error(guard):
                if one is not None:
                    one.advance(micro_steps)
                    for _, error in one.errors:
                        raise error
                    metrics = next((own for _, own in one.metrics), None)
                guard.end()
        except EngineFault:
            raise
        except PeerFailed:
            code = PEER_FAILED
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            code, message = training.failure(error)
        # Outside `except`: the error's traceback, which held tensors, is gone.
        position = training.loop.position
        if code:
            self._passes.abandon(training)
            guard.finish_collectives()
        elif one is not None:
            self.micro_steps_done = one.micro_steps_done
            self._passes.settle(one)
        return Outcome(position, code, message, metrics)

    @property
    def has_graphs(self) -> bool:
        """Whether CUDA graphs of layers hold memory."""
        return self._graphs is not None and self._graphs.in_use

    def retry(self, job: str, how: Retry) -> list[FromEngine]:
        """Begin the optimizer step again, on every rank, after an `attempt` that failed on some rank. Returns notes for
        the user; empty also if memory should be lowered and nothing is left to lower."""
        training = self._jobs[job]
        self._passes.abandon(training)  # even if this rank's own slice succeeded
        self._passes.release_memory()
        if self._graphs is not None and how.stop_graphs:
            self._graphs.stop(how.stop_graphs)
        return self._passes.lower_memory(training) if how.lower else []

    def limit(self, job: str, treatment: Treatment) -> None:
        """Set the job's recompute plan, as memory was planned."""
        self._jobs[job].loop.limit_memory(treatment)

    @property
    def layer_costs(self) -> TrainingCosts | None:
        """Memory costs of compiled layers, if jobs use them."""
        return None if self._compiled is None else self._compiled.costs

    def limit_shared(self, tokens: int | None) -> None:
        """Set the most tokens of a forward that several jobs share, as memory was planned; None: as configured."""
        self._passes.limit(tokens)

    def finished(self, job: str) -> bool:
        """Whether the job only remains to be published."""
        return self._jobs[job].loop.finished

    def checkpoint_due(self, job: str) -> bool:
        """Whether the job's last slice finished an optimizer step that needs a checkpoint."""
        return not self._jobs[job].mid_step and self._jobs[job].checkpoints.due

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on jobs that train with less memory, fewer shared forwards or slower layers than intended."""
        jobs = [(id, note) for id, job in self._jobs.items() for note in job.notes]
        if self._compiled is not None and self._compiled.ready:
            jobs += [(id, note) for id, job in self._jobs.items() for note in uncompiled(job.loop.spec)]
        layers = [note for own in (self._compiled, self._graphs) if own is not None for note in own.notes]
        return (*(f"job {id}: {note}" for id, note in jobs), *layers, *self._passes.notes)

    @property
    def batches(self) -> TrainingBatches:
        """Counts of training forwards so far."""
        return self._passes.batches

    def mid_batch(self, job: str) -> bool:
        """Whether the job is suspended within a micro-batch."""
        return job in self._passes

    def next_micro_step(self, job: str) -> MicroStep:
        """The kind of the job's next micro-step."""
        return self._passes.next_micro_step(job)

    def micro_batch_tokens(self, job: str) -> int:
        """Tokens of the job's current batch, other jobs' rows included; between two batches at least those of its own
        next one, if known; 0: unknown."""
        own, under_way = self._jobs[job], job in self._passes
        return own.batch_tokens if under_way else own.next_tokens

    def checkpoint(self, job: str) -> Callable[[], JobCheckpoint] | None:
        """Complete an update of the weights that has begun, drop any other unfinished step, and begin a snapshot of the
        last finished one. None if that step is on disk already.

        Call the returned function on a worker thread: the checkpoint is durable when it returns; it raises
        `StorageError`. The job may be advanced meanwhile. At most one checkpoint or publication of a job may run at a
        time.
        """
        self.abandon(job, finish_update=True)
        with self._job_errors():
            write = self._jobs[job].checkpoints.save()
        if write is None:
            return None
        step = self._jobs[job].loop.progress.step

        def save() -> JobCheckpoint:
            with self._job_errors():
                write()
            return JobCheckpoint(id=job, step=step)

        return save

    def snapshot_due(self, job: str) -> bool:
        """Whether samples of the job's current weights are due, between two optimizer steps or at its end."""
        return not self._jobs[job].mid_step and self._jobs[job].snapshots.due

    def snapshot(self, job: str) -> Callable[[], Callable[[], JobSnapshot | JobNote]]:
        """Begin a snapshot that is due, for requests: see `finetune.publication`. The job may be advanced meanwhile.
        Like a checkpoint, it occupies the job's host copy."""
        return self._begin_snapshot(job).copy

    def _begin_snapshot(self, job: str) -> Snapshot:
        with self._job_errors():
            step, weights = self._jobs[job].snapshots.take()
        ref = AdapterRef(f"{job}:snapshot", next(self._snapshot_numbers))
        copy = snapshot(job, step, ref, weights, self._base, self._store)

        def run() -> Callable[[], JobSnapshot | JobNote]:
            with self._job_errors():
                return copy()

        return Snapshot(ref, step, run)

    def _gathering(self, job: str, weights_only: bool) -> None:
        """Hook: a snapshot begins in which all ranks take part."""

    def gather(self, job: str, *, weights_only: bool) -> None:
        """Take part, as a follower rank, in rank 0's snapshot (`AdapterOptimizer.snapshot`); raises what it raises."""
        self._jobs[job].snapshots.gather(weights_only=weights_only)

    def gathered_copy(self, job: str) -> Callable[[], LoraWeights | None]:
        """Return a function that makes, on a worker thread, a follower rank's own copy of the last gathered weights,
        for requests; its result is None if there is no memory."""
        return self._jobs[job].snapshots.gathered_copy(self._base, self._store)

    def abandon(self, job: str, *, finish_update: bool = False) -> None:
        """Drop the unfinished optimizer step and its memory. Other jobs of its pass continue. `finish_update`: if the
        weights are being updated, complete the update, and the step counts; without `finish_update`, or if completing
        it raises, the job can only be dropped."""
        if self._jobs[job].mid_step:
            with self._job_errors():
                self._passes.abandon(self._jobs[job], finish_update=finish_update)

    def publication(self, job: str) -> Callable[[], Callable[[], Published]]:
        """Begin to publish a finished job: see `finetune.publication`."""
        with self._job_errors():
            write = publication(self._jobs[job].loop, self._base, self._folder, self._store)

        def run() -> Callable[[], Published]:
            with self._job_errors():
                return write()

        return run

    def release_memory(self) -> bool:
        """Free memory that micro-batches do not need, after an out-of-memory. Returns whether there was any."""
        return self._passes.release_memory()

    def holds_memory_of(self, job: str) -> bool:
        """Whether a pass of other jobs still holds memory of a job that was dropped."""
        return self._passes.holds_memory_of(job)

    def drop(self, job: str) -> None:
        """Free the job's memory, except what `holds_memory_of` reports; its files stay."""
        training = self._jobs.pop(job)
        self._kept.forget()
        with self._job_errors():
            self._passes.abandon(training)
        self._passes.job_ended(last=not self._jobs)

    def _load(self, spec: JobSpec, check: Callable[[], None]) -> TrainingJob:
        base = self._base
        ranks = 1 if base.sharding is None else base.sharding.mesh.size
        check_optimizer(spec.training.optimizer, ranks=ranks)
        corpus = Corpus.load(self._folder.corpus(spec.id), check, digest=spec.corpus_digest)
        if int(corpus.tokens.max()) >= base.spec.vocab:
            raise CheckpointUnreadable("the job's corpus has tokens that the base does not know")
        plan = self._make_plan(corpus.lengths, spec.training, self._settings.limits.tokens, check)
        start = base.with_magnitudes(initial_weights(spec, base.spec, self._folder))
        partition = base.partition(start)
        if partition is not None and not partition.keeps_blocks(start.sites):
            ranks = partition.sharding.mesh.size
            raise InvalidRequest(f"expected bd_blocks that {ranks} GPUs divide, or that divide them", field="bd_blocks")
        gathering = partial(self._gathering, spec.id)
        optimizer = self._settings.make_optimizer(
            start, base.spec, spec.training, base.dtype, base.device, partition, gathering, row_norms=base.row_norms
        )
        session = TrainingSession(
            optimizer,
            seed=spec.training.seed,
            dropout=spec.lora.dropout,
            neftune_alpha=spec.training.neftune_alpha,
            device=base.device,
            timer=SliceTimer(self._settings.clock, overlapped=self._overlapped),
            check_peers=self._guard.check,
            overlapped=self._overlapped,
        )
        loop = TrainingLoop(spec, corpus, plan, session, self._loss(spec, start))
        check()
        checkpoints = JobCheckpoints(self._folder, base.spec, loop, keep=self._settings.keep_checkpoints)
        checkpoints.resume()
        if loop.progress.step < plan.total_steps:
            plan.prepare(loop.progress.step, check)
        return TrainingJob(loop, checkpoints)

    def _loss(self, spec: JobSpec, start: LoraWeights) -> Loss:
        """Build the job's loss. `start`: the job's initial adapter, which a DPO loss may refer to; a resumed job's
        weights have moved on."""
        base, beta = self._base, None if spec.training.loss is None else spec.training.loss.beta
        reference = cast_learning(base.served(start), base.dtype, base.device) if has_reference(spec) else None
        return Loss(self._teacher_weights(spec), beta, reference)

    def _teacher_weights(self, spec: JobSpec) -> LoraWeights | None:
        """The teacher's weights as served: this rank's shard, on the base's device and in its dtype."""
        if spec.teacher is None:
            return None
        base, teacher = self._base, spec.teacher
        weights = published_adapter(teacher.ref, teacher.digests, "teacher", base.spec, self._folder)
        if weights.settings.use_dora and base.sharding is not None:
            raise InvalidRequest("a DoRA teacher on several GPUs is not implemented: expected --tp 1", field="teacher")
        return cast(base.served(weights), base.dtype, base.device)

    @contextmanager
    def _job_errors(self) -> Iterator[None]:
        """Context, on the jobs' stream, in which errors end only the job: see `contained`. Out-of-memory becomes
        `JobOutOfMemory`."""
        with self._stream(), contained(self._base.device):
            try:
                yield
            except Exception as error:
                if not out_of_memory(error):
                    raise
                numbers = memory_numbers(error, self._base.device)
                raise JobOutOfMemory(f"not enough memory ({numbers}); try a smaller rank") from error
