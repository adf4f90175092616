"""Sessions of an engine and what runs them, on any rank: passes, errors, memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from coserve.admission.optimizers import check_optimizer
from coserve.admission.ranks import keeps_reference
from coserve.core.errors import EngineFault, InvalidRequest, JobOutOfMemory
from coserve.core.training.jobs import JobSpec
from coserve.core.training.step_metrics import StepMetrics
from coserve.data.corpus.batch_plan import MAX_ROWS_ON_TICK
from coserve.finetune.frozen import Frozen, frozen_reference, frozen_teacher
from coserve.finetune.init import initial_weights, published_adapter
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.losses.loss import CrossEntropy, Loss
from coserve.finetune.memory_limits import BatchLimits
from coserve.finetune.micro_batch import MicroBatchRunner
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.passes.passes import TrainingPasses
from coserve.finetune.passes.training_pass import TrainingPass
from coserve.finetune.sessions.session import SliceTimer, TrainingSession, Verb
from coserve.finetune.sessions.trainee import PEER_FAILED, Outcome, Retry, Trainee
from coserve.kernels.lora.interface import LoraBackend
from coserve.lora.store.store import AdapterStore
from coserve.model.base import Base
from coserve.model.faults import contained, memory_numbers, out_of_memory
from coserve.model.lora import KeptLora, LoraWeights
from coserve.model.parallel.guard import SliceGuard, aborting_on_error
from coserve.model.parallel.lockstep import PeerFailed
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.state.folder import DataFolder

AnyTrainee = TypeVar("AnyTrainee", bound=Trainee)


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


class Sessions(Generic[AnyTrainee]):
    """Sessions by their jobs' ids."""

    def __init__(self, base: Base, store: AdapterStore, folder: DataFolder, settings: TrainerSettings) -> None:
        """Raises `UnsupportedBase` for a base that cannot run layer by layer."""
        self._base, self._store, self._folder, self._settings = base, store, folder, settings
        limits, lora_backend = settings.limits, settings.lora_backend
        self._guard = SliceGuard() if base.sharding is None else base.sharding.mesh.guard
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
        self._jobs: dict[str, AnyTrainee] = {}
        self.micro_steps_done = 0
        """Micro-steps done in the last slice."""

    def attempt(self, job: str, micro_steps: int | None, ready: Callable[[], None] = lambda: None) -> Outcome:
        """Run a slice (see `TrainingPass.advance`) on one of several ranks. On return no rank is in a collective of the
        slice, whichever rank failed.

        After an error the unfinished optimizer step is dropped. `trainee.judge` decides from the outcomes of all ranks.
        Raises only `EngineFault`.
        """
        training, guard = self._jobs[job], self._guard
        self.micro_steps_done, updates = 0, training.session.updates
        one = self._passes.pass_of(training)
        code = message = ""
        metrics: StepMetrics | None = None
        guard.begin(self._base.device)
        try:
            with contained(self._base.device), aborting_on_error(guard):
                if one is None:
                    ready()
                else:
                    one.advance(micro_steps, ready)
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
        updated = training.session.updates != updates
        if code:
            self._passes.abandon(training)
            guard.finish_collectives()
        elif one is not None:
            self.micro_steps_done = one.micro_steps_done
            self._passes.settle(one)
        return Outcome(code, message, updated, metrics)

    @property
    def has_graphs(self) -> bool:
        """Whether CUDA graphs of layers hold memory."""
        return self._graphs is not None and self._graphs.in_use

    def begin_again(self, job: str, how: Retry) -> None:
        """Drop the unfinished optimizer step, on every rank, after an `attempt` that failed on some rank, and free
        memory that other passes do not need."""
        self._passes.abandon(self._jobs[job])  # even if this rank's own slice succeeded
        self._passes.release_memory()
        if self._graphs is not None and how.stop_graphs:
            self._graphs.stop(how.stop_graphs)

    def release_memory(self) -> bool:
        """Free memory that micro-batches do not need, after an out-of-memory. Returns whether there was any."""
        return self._passes.release_memory()

    def drop(self, job: str) -> None:
        """Free the job's memory, except what `Trainer.holds_memory_of` reports; its files stay."""
        training = self._jobs.pop(job)
        self._kept.forget()
        with self._job_errors():
            self._passes.abandon(training)
        self._passes.job_ended(last=not self._jobs)

    def _session(self, spec: JobSpec) -> tuple[TrainingSession, Loss]:
        base, settings = self._base, self._settings
        ranks = 1 if base.sharding is None else base.sharding.mesh.size
        check_optimizer(spec.training.optimizer, ranks=ranks)
        start, part = initial_weights(spec, base, self._folder)
        partition = base.partition(start, learns=True)
        if partition is not None and not partition.keeps_blocks(start.sites):
            ranks = partition.sharding.mesh.size
            raise InvalidRequest(f"expected bd_blocks that {ranks} GPUs divide, or that divide them", field="bd_blocks")
        session = TrainingSession(
            settings.make_optimizer(
                start, base.spec, spec.training, base.dtype, base.device, partition, row_norms=base.row_norms, part=part
            ),
            seed=spec.training.seed,
            dropout=spec.lora.dropout,
            neftune_alpha=spec.training.neftune_alpha,
            device=base.device,
            timer=SliceTimer(settings.clock, overlapped=self._overlapped),
            check_peers=self._guard.check,
            announce=partial(self._announce, spec.id),
            overlapped=self._overlapped,
        )
        return session, self._loss(spec, part)

    def _announce(self, job: str, verb: Verb) -> None:
        """Hook: the job's session begins a verb, in which all ranks take part."""

    def _loss(self, spec: JobSpec, start: LoraWeights) -> Loss:
        """Build the job's loss. `start`: this rank's shards of the job's initial adapter, which a DPO loss may refer
        to; a resumed job's weights have moved on."""
        teacher, reference = self._teacher(spec), None
        if keeps_reference(spec.training, continues=spec.init_from is not None):
            reference = frozen_reference(start, self._base)
        loss = Loss(preference=spec.training.loss, tokens=CrossEntropy() if spec.soft_targets else None)
        if teacher is not None:  # then there is no reference
            return replace(loss, teacher=teacher.weights, prepare=teacher.complete)
        return loss if reference is None else replace(loss, reference=reference.weights, prepare=reference.complete)

    def _teacher(self, spec: JobSpec) -> Frozen | None:
        if spec.teacher is None:
            return None
        base, teacher = self._base, spec.teacher
        served = published_adapter(teacher.ref, teacher.digests, "teacher", base.spec, self._folder, base.served)
        return frozen_teacher(served, base)

    @contextmanager
    def _job_errors(self) -> Iterator[None]:
        """Context, on the jobs' stream, in which errors end only the job: see `contained`. Out-of-memory becomes
        `JobOutOfMemory`. As a decorator it wraps each call of the function."""
        with self._stream(), contained(self._base.device):
            try:
                yield
            except Exception as error:  # any kind: lack of memory has several
                if not out_of_memory(error):
                    raise
                numbers = memory_numbers(error, self._base.device)
                raise JobOutOfMemory(f"not enough memory ({numbers}); try a smaller rank") from error
