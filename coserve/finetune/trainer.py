"""The engine's fine-tuning side: loads jobs, advances them in slices, saves checkpoints, publishes adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from torch import Tensor

from coserve.admission.recompute_plan import RecomputePlan
from coserve.core.cancellation import Cancellation
from coserve.core.errors import CheckpointUnreadable
from coserve.core.gpu_memory import TrainingCosts
from coserve.core.link.jobs import JobCheckpoint, JobNote, JobSnapshot, JobStarted
from coserve.core.link.link import FromEngine
from coserve.core.link.stats import TrainingBatches
from coserve.core.training.jobs import JobSpec
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.schemas import Compute, SaveAdapter, SaveState, SessionSpec
from coserve.core.types import AdapterRef
from coserve.data.corpus.batch_plan import BatchPlan
from coserve.data.corpus.tokenized import Corpus
from coserve.data.documents.encoder import encoded_tokens
from coserve.finetune.checkpoint import load_state, save_state
from coserve.finetune.encoder import beside, encode
from coserve.finetune.init import first_cartridge
from coserve.finetune.job_checkpoint import JobCheckpoints
from coserve.finetune.layers.compiled import uncompiled
from coserve.finetune.loop import TrainingLoop
from coserve.finetune.memory_limits import Size
from coserve.finetune.publication import JobSnapshots, Published, Snapshot, publication, publish_adapter, snapshot
from coserve.finetune.sessions.client import ClientTrainee, Work, work_of
from coserve.finetune.sessions.session import Event
from coserve.finetune.sessions.sessions import Sessions, TrainerSettings
from coserve.finetune.sessions.trainee import Retry, Trainee
from coserve.lora.store.store import AdapterStore
from coserve.model.base import Base
from coserve.model.lora import LoraWeights
from coserve.state.folder import DataFolder


class TrainingJob(Trainee):
    """The session of a fine-tuning job, with the `TrainingLoop` that decides its steps."""

    def __init__(self, loop: TrainingLoop, checkpoints: JobCheckpoints) -> None:
        super().__init__(loop.spec.id, loop.session)
        self.spec = loop.spec
        self.loop, self.checkpoints, self.snapshots = loop, checkpoints, JobSnapshots(loop)
        self.limits = loop.limits
        self._next_tokens: int | None = None
        """Cached tokens of the job's own next micro-batch; 0: unknown; None: not computed yet."""

    @property
    def notes(self) -> tuple[str, ...]:
        alone = "it trains alone, since a batch that it shared with other jobs failed" if self.alone else None
        return tuple(note for note in (self.memory_note, alone) if note is not None)

    @property
    def has_work(self) -> bool:
        return not self.loop.finished

    @property
    def shared_size(self) -> Size | None:
        rows = None if self.alone or self.spec.prefix else self.loop.next_rows
        return None if rows is None else Size(self.limits.size(rows), len(rows))

    @property
    def tokens_in_progress(self) -> int:
        return self.loop.tokens_in_progress

    @property
    def next_tokens(self) -> int:
        """Predicted tokens of the next batch: those of the job's own next micro-batch, or of its last batch if that was
        larger, since other jobs may join again."""
        if self._next_tokens is None:  # cached: each scheduling decision reads it
            size = self.shared_size
            self._next_tokens = 0 if size is None else size.tokens
        return max(self.batch_tokens, self._next_tokens)

    def go_on(self, sums: Tensor | None = None) -> Event:
        if self._training is None:
            self.begin(self.loop.run())
        self._next_tokens = None
        return super().go_on(sums)

    def lower_memory(self) -> bool:
        """The optimizer step, once abandoned, begins again with smaller micro-batches."""
        note = self.loop.lower_memory()
        if note is not None:
            self.memory_note = note
        return note is not None

    def abandon(self, *, finish_update: bool = False) -> None:
        self._next_tokens = None
        super().abandon(finish_update=finish_update)


@dataclass(frozen=True)
class LoadedJob:
    """A loaded job that is not registered yet. Call it on the event-loop thread to commit the load."""

    started: JobStarted
    commit: Callable[[], None]

    def __call__(self) -> JobStarted:
        self.commit()
        return self.started


class Trainer(Sessions[TrainingJob | ClientTrainee]):
    """All jobs and clients' sessions of one engine. Each has its own adapter, optimizer and seed; they share the base.

    Jobs alternate at the ends of micro-batches, or share a `TrainingPass`. Work in between does not change a job's
    result, and sharing a pass changes it only by rounding.
    """

    def __init__(self, base: Base, store: AdapterStore, folder: DataFolder, settings: TrainerSettings) -> None:
        """Raises `UnsupportedBase` for a base that cannot run layer by layer."""
        super().__init__(base, store, folder, settings)
        rows = settings.limits.rows
        self._make_plan = partial(BatchPlan, micro_batch_rows=rows, rows_on_tick=settings.rows_on_tick)
        self._snapshot_numbers = count(1)
        """Each snapshot has its own version, so that prefix-cache entries of other weights are never reused."""
        self.trained: tuple[str, ...] = ()
        """Jobs in the last slice."""

    def load(self, spec: JobSpec, cancellation: Cancellation) -> LoadedJob:
        """Load a job into memory from its last readable checkpoint; on any thread.

        Raises `Cancelled`, `CheckpointUnreadable` (its corpus), `AdapterNotFound` (the adapter it continues, or its
        teacher), `InvalidRequest` (settings that do not fit the base), `JobOutOfMemory`.
        """
        with self._job_errors():
            if isinstance(spec, SessionSpec):
                job: TrainingJob | ClientTrainee = self._open(spec)
            else:
                job = self._load(spec, cancellation.check)

        def commit() -> None:
            assert spec.id not in self._jobs, f"job {spec.id} runs already"
            if isinstance(job, TrainingJob) and job.spec.lora.cartridge and not job.loop.progress.step:
                with self._job_errors():
                    job.session.optimizer.begin_with(first_cartridge(job.spec, self._base))
            self._jobs[spec.id] = job

        if isinstance(job, ClientTrainee):
            return LoadedJob(JobStarted(id=spec.id, total_steps=0, resumed_from=job.step), commit)
        return LoadedJob(job.checkpoints.started(), commit)

    def preparation(self, job: str) -> Callable[[Cancellation], None] | None:
        """Return work for a worker thread that must precede the next `advance`; usually None. The job must not be
        advanced meanwhile."""
        training = self._job(job)
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

    def retry(self, job: str, how: Retry) -> list[FromEngine]:
        """Begin the optimizer step again: see `begin_again`. Returns notes for the user; empty also if memory should be
        lowered and nothing is left to lower."""
        self.begin_again(job, how)
        return self._passes.lower_memory(self._jobs[job]) if how.lower else []

    def limit(self, job: str, recompute_plan: RecomputePlan) -> None:
        """Set the job's recompute plan, as memory was planned."""
        self._jobs[job].limits.plan(recompute_plan)

    @property
    def layer_costs(self) -> TrainingCosts | None:
        """Memory costs of compiled layers, if jobs use them."""
        return None if self._compiled is None else self._compiled.costs

    def limit_shared(self, tokens: int | None) -> None:
        """Set the most tokens of a forward that several jobs share, as memory was planned; None: as configured."""
        self._passes.limit(tokens)

    def finished(self, job: str) -> bool:
        """Whether a job's training is complete, or a client's session has no call to compute."""
        own = self._jobs[job]
        return own.outcome is not None if isinstance(own, ClientTrainee) else own.loop.finished

    def checkpoint_due(self, job: str) -> bool:
        """Whether the job's last slice finished an optimizer step that needs a checkpoint."""
        return not self._jobs[job].mid_step and self._job(job).checkpoints.due

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on jobs that train with less memory, fewer shared forwards or slower layers than intended."""
        jobs = [(id, note) for id, job in self._jobs.items() for note in job.notes]
        if self._compiled is not None and self._compiled.ready:
            jobs += [(id, note) for id, job in self._jobs.items() for note in uncompiled(job.spec)]
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
            write = self._job(job).checkpoints.save()
        if write is None:
            return None
        step = self._job(job).loop.progress.step

        def save() -> JobCheckpoint:
            with self._job_errors():
                write()
            return JobCheckpoint(id=job, step=step)

        return save

    def snapshot_due(self, job: str) -> bool:
        """Whether samples of the job's current weights are due, between two optimizer steps or at its end."""
        return not self._jobs[job].mid_step and self._job(job).snapshots.due

    def snapshot(self, job: str) -> Callable[[], Callable[[], JobSnapshot | JobNote]]:
        """Begin a snapshot that is due, for requests: see `finetune.publication`. The job may be advanced meanwhile.
        Like a checkpoint, it occupies the job's host copy."""
        return self._begin_snapshot(job).copy

    def _begin_snapshot(self, job: str) -> Snapshot:
        with self._job_errors():
            step, own = self._job(job).snapshots.take()
            weights = self._to_publish(job, own)
        ref = AdapterRef(f"{job}:snapshot", next(self._snapshot_numbers))
        loop = self._job(job).loop
        final, required = loop.finished, loop.finished and loop.spec.evaluated
        copy = snapshot(job, step, ref, weights, self._base, self._store, final=final, required=required)

        return Snapshot(ref, step, self._job_errors()(copy), required)

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
            loop = self._job(job).loop
            weights = self._to_publish(job, loop.session.final_weights())
            write = publication(loop, self._base, self._folder, self._store, weights)
        return self._job_errors()(write)

    def _to_publish(self, job: str, own: Callable[[], LoraWeights]) -> Callable[[], LoraWeights]:
        """Return a function that returns the adapter that the job makes: `own()`, the job's weights; with an encoder,
        which reads its document here, the cartridge, and the decoder's LoRA if there is one."""
        loop = self._job(job).loop
        if not encoded_tokens(loop.spec):
            return own
        weights = loop.session.optimizer.weights()
        read = encode(loop.spec, self._base, weights, self._settings.lora_backend)
        return (lambda: beside(read, own())) if loop.spec.lora.decoder else lambda: read

    # ---- sessions of clients

    def work_of(self, call: Compute) -> Work:
        """Check a call; on any thread. Raises `InvalidRequest`."""
        return work_of(call, self._base.spec.vocab, self._settings.limits)

    def client(self, session: str) -> ClientTrainee:
        """Return a client's session, to pass it the client's calls."""
        own = self._jobs[session]
        assert isinstance(own, ClientTrainee), f"{session} is a job"
        return own

    def save_state(self, session: str, call: SaveState) -> Callable[[], Callable[[], None]]:
        """Begin to save a session's state. Call the returned function on a worker thread: the state is durable when it
        returns. It raises `NonFiniteLoss`, `StorageError`."""
        own = self.client(session)
        with self._job_errors():
            tensors = own.session.snapshot()

        def save() -> Callable[[], None]:
            with self._job_errors():
                save_state(self._folder, call, own.spec, self._base.spec, own.step, tensors())
            return lambda: None

        return save

    def save_adapter(self, session: str, call: SaveAdapter) -> Callable[[], Callable[[], None]]:
        """Begin to make a session's weights available to requests: see `finetune.publication.publish_adapter`."""
        with self._job_errors():
            weights = self.client(session).session.current_weights()
        copy = publish_adapter(call.ref, weights, self._base, self._folder, self._store, files=call.files)
        return self._job_errors()(copy)

    def holds_memory_of(self, job: str) -> bool:
        """Whether a pass of other jobs still holds memory of a job that was dropped."""
        return self._passes.holds_memory_of(job)

    def _job(self, id: str) -> TrainingJob:
        own = self._jobs[id]
        assert isinstance(own, TrainingJob), f"{id} is a client's session"
        return own

    def _open(self, spec: SessionSpec) -> ClientTrainee:
        session, _ = self._session(spec)
        step = 0 if spec.state is None else load_state(self._folder, spec, self._base.spec, session.optimizer)
        return ClientTrainee(spec, session, step)

    def _load(self, spec: JobSpec, check: Callable[[], None]) -> TrainingJob:
        base = self._base
        corpus = Corpus.load(self._folder.corpus(spec.id), check, digest=spec.corpus_digest)
        if max(int(ids.max()) for ids in (corpus.tokens, corpus.candidates) if ids is not None) >= base.spec.vocab:
            raise CheckpointUnreadable("the job's corpus has tokens that the base does not know")
        limit = self._settings.limits.tokens - encoded_tokens(spec)
        plan = self._make_plan(corpus.lengths, spec.training, limit, check, first_rows=spec.first_rows)
        loop = TrainingLoop(spec, corpus, plan, *self._session(spec))
        check()
        checkpoints = JobCheckpoints(self._folder, base.spec, loop, keep=self._settings.keep_checkpoints)
        checkpoints.resume()
        if loop.progress.step < plan.total_steps:
            plan.prepare(loop.progress.step, check)
        return TrainingJob(loop, checkpoints)
