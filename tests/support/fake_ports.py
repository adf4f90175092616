"""A generator and a trainer without a model: their steps cost virtual seconds and their tokens are a function.

Each checks by assertion what the engine owes it: nothing is added or started twice, nothing unknown is touched, no two
micro-batches are suspended at once. `Meter` gathers what a step costs; the engine's `pace` spends it.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coserve.adapter_store.host import HostBudget
from coserve.adapter_store.store import AdapterStore
from coserve.admission.treatment import Treatment
from coserve.cancellation import Cancellation
from coserve.errors import CheckpointUnreadable, PromptTooLong
from coserve.finetune.passes.mixing import BatchLimits, Size, companions
from coserve.gpu_memory import TrainingCosts
from coserve.link import (
    FromEngine,
    Generate,
    JobCheckpoint,
    JobFailed,
    JobNote,
    JobProgress,
    JobSnapshot,
    JobStarted,
    JobSucceeded,
    JobWaiting,
    RequestFailed,
    Tokens,
    TrainingBatches,
)
from coserve.memory.allocator import AllocatorStats
from coserve.model.lora import LoraWeights
from coserve.queues.inference import Queued
from coserve.queues.shapes import StepShape
from coserve.step_metrics import StepMetrics
from coserve.types import AdapterDigests, AdapterRef, FinishReason, JobSpec, LoraSettings, MicroStep

T = TypeVar("T")

CONTEXT = 64
"""Longer prompts are refused."""


def token(request: Generate, t: int) -> int:
    """Token `t` of a request depends on the request alone."""
    return zlib.crc32(repr((request.prompt, request.sampling.seed, str(request.adapter), t)).encode())


class Meter:
    """Virtual seconds that the last step cost, and the longest steps of each kind so far."""

    def __init__(self) -> None:
        self.owed = 0.0
        self.longest: dict[str, float] = {"serve": 0.0, "train": 0.0}

    def charge(self, kind: str, seconds: float) -> None:
        self.owed += seconds
        self.longest[kind] = max(self.longest[kind], seconds)

    async def pace(self) -> None:
        seconds, self.owed = self.owed, 0.0
        await asyncio.sleep(seconds)


@dataclass(frozen=True)
class Prices:
    """Virtual seconds: a generation step, each of its tokens, a training micro-step; `spikes`: share of ten-fold steps."""

    step: float
    token: float
    micro_step: float
    spikes: float


@dataclass
class _Sequence:
    request: Generate
    to_prefill: int
    made: int = 0


class FakeGenerator:
    """Packs decodes, then chunks of prefill, up to `step_tokens`; now and then preempts or fails a sequence, or preempts all
    and loses the adapter of the first: until it was read again (`read` is called then), no step can compute anything."""

    def __init__(self, meter: Meter, prices: Prices, step_tokens: int, rng: random.Random, chaos: float) -> None:
        self._meter, self._prices, self._step_tokens, self._rng, self._chaos = meter, prices, step_tokens, rng, chaos
        self._sequences: dict[str, _Sequence] = {}
        self.admitted: dict[str, float] = {}
        self._waiting = set[str]()
        """No step has worked on them."""
        self._started: list[str] = []
        self.preemptions = 0
        self.prefix_queries = self.prefix_hits = 0
        self.troubles: tuple[str, ...] = ()
        self.pages_total = 1 << 20
        self.adapter_pages = 0
        self.tokens_computed = 0
        """Tokens, in all steps."""
        self.read: Callable[[], None] = lambda: None
        self._lost = False
        self._launched_prompts = dict[str, int]()
        self._shape: StepShape | None = None

    in_flight = False
    room = 1 << 20

    def launched_prompts(self) -> dict[str, int]:
        return self._launched_prompts

    def computed(self) -> StepShape | None:
        shape, self._shape = self._shape, None
        return shape

    @property
    def blocked(self) -> bool:
        return self._lost and bool(self._sequences)

    @property
    def running(self) -> int:
        return len(self._sequences)

    @property
    def pages_used(self) -> int:
        return sum(len(s.request.prompt) - s.to_prefill + s.made for s in self._sequences.values())

    def allocator(self) -> AllocatorStats:
        return AllocatorStats()

    def add(self, request: Generate) -> None:
        assert request.id not in self.admitted, f"{request.id} was admitted twice"
        self.admitted[request.id] = asyncio.get_running_loop().time()
        if len(request.prompt) > CONTEXT:
            raise PromptTooLong(f"expected at most {CONTEXT} tokens, got {len(request.prompt)}")
        self._sequences[request.id] = _Sequence(request, len(request.prompt))
        self._waiting.add(request.id)

    def cancel(self, id: str) -> None:
        self._sequences.pop(id, None)  # it may have ended in the step that runs
        self._waiting.discard(id)

    def collect(self) -> list[Tokens | RequestFailed]:
        return []

    def started(self) -> list[str]:
        found, self._started = self._started, []
        return found

    def prepare(self) -> bool:
        return False

    def step(self) -> list[Tokens | RequestFailed]:
        assert not self.blocked, "a step that can compute nothing"
        budget, results, shape = self._step_tokens, list[Tokens | RequestFailed](), StepShape()
        self._launched_prompts = {}
        self._preempt_one()
        for sequence in sorted(self._sequences.values(), key=lambda s: s.to_prefill > 0):  # decodes first; stable
            if budget == 0:
                break
            if sequence.request.id in self._waiting:
                self._waiting.discard(sequence.request.id)
                self._started.append(sequence.request.id)
            chunk = min(sequence.to_prefill, budget)
            context = len(sequence.request.prompt) + sequence.made
            if chunk:
                shape = shape.and_prompt(chunk, context - sequence.to_prefill)
            else:
                shape += StepShape(1, context)
            budget -= max(chunk, 1)
            sequence.to_prefill -= chunk
            if chunk:
                self._launched_prompts[sequence.request.id] = sequence.to_prefill
            if sequence.to_prefill == 0:
                results.append(self._next(sequence))
        self._shape, spent = shape, self._step_tokens - budget
        self.tokens_computed += spent
        self._lose_one()
        factor = 10 if self._rng.random() < self._prices.spikes else 1
        self._meter.charge("serve", factor * (self._prices.step + spent * self._prices.token))
        return results

    def _preempt_one(self) -> None:
        if self._sequences and self._rng.random() < self._chaos:
            self._preempt(self._rng.choice(list(self._sequences.values())))

    def _preempt(self, victim: _Sequence) -> None:
        victim.to_prefill = len(victim.request.prompt) + victim.made
        self.preemptions += 1

    def _lose_one(self) -> None:
        if self._sequences and self._rng.random() < self._chaos:
            for victim in self._sequences.values():
                self._preempt(victim)
            self._lost = True
            asyncio.get_running_loop().call_later(self._rng.expovariate(5), self._find)

    def _find(self) -> None:
        self._lost = False
        self.read()

    def _next(self, sequence: _Sequence) -> Tokens | RequestFailed:
        request = sequence.request
        if self._rng.random() < self._chaos / 4:
            del self._sequences[request.id]
            return RequestFailed(id=request.id, code="internal_error", message="chaos")
        made = token(request, sequence.made)
        sequence.made += 1
        finished = FinishReason.LENGTH if sequence.made == request.sampling.max_tokens else None
        if finished:
            del self._sequences[request.id]
        return Tokens(id=request.id, tokens=(made,), finished=finished)


@dataclass(frozen=True)
class JobPlan:
    """How a fake job goes. A step is one micro-batch of `micro_steps` micro-steps; `fails_at` is a step, 0 refuses the start."""

    steps: int
    micro_steps: int
    checkpoint_every: int
    fails_at: int | None
    rows: int | None = None
    """Of a micro-batch; None: it shares no forward with other jobs'."""
    evaluate_every: int | None = None
    """Steps after which an evaluation, one micro-batch of its own, ends the step."""


ROW_TOKENS = 64


def _size(rows: int) -> Size:
    return Size(ROW_TOKENS * rows, rows)


@dataclass
class FakePass:
    """A micro-batch of some jobs."""

    jobs: list[str]
    """Those that have not left."""
    rows: dict[str, int | None]
    """Of all jobs that it began with."""
    kinds: list[MicroStep]
    done: int = 0
    evaluation: bool = False


@dataclass
class _Run:
    spec: JobSpec
    step: int
    shared: FakePass | None = None
    """While it is within a micro-batch."""
    evaluates: bool = False
    """Its next micro-batch is an evaluation."""
    tried: int = 0
    """The last step whose checkpoint was begun."""
    snapshot: int = 0
    """The step of the last snapshot."""


@dataclass
class FakeTrainer:
    """Runs the plans. `ran` is each job's steps, in order, since its last (re)start. Jobs share micro-batches of at most `batch_rows`
    rows, as the real trainer chooses them; a micro-step of so many rows costs `Prices.micro_step`, fewer rows less."""

    meter: Meter
    prices: Prices
    plans: dict[str, JobPlan]
    rng: random.Random
    clock: Callable[[], float]
    ran: dict[str, list[int]] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    published: list[str] = field(default_factory=list)
    micro_steps_done: int = 0
    writing: set[str] = field(default_factory=set)
    """Jobs of which a checkpoint, a snapshot or a publication has begun."""
    batch_rows: int | None = None
    trained: tuple[str, ...] = ()
    batches: TrainingBatches = field(default_factory=TrainingBatches)
    passes: list[FakePass] = field(default_factory=list)
    """All that have begun."""
    gaps: list[float] = field(default_factory=list)
    """How long the jobs waited for each slice, all together."""
    limits: dict[str, Treatment] = field(default_factory=dict)
    """The last `limit` of each job."""
    layer_costs: TrainingCosts | None = None
    """Of compiled layers."""
    sample_every: int | None = None
    """Steps between two snapshots of a job."""
    _runs: dict[str, _Run] = field(default_factory=dict)
    _idle_since: float = 0.0

    def load(self, spec: JobSpec, cancellation: Cancellation) -> Callable[[], JobStarted]:
        assert spec.id not in self._runs, f"{spec.id} started twice"
        assert spec.id not in self.published, f"{spec.id} started after its end"
        plan = self.plans[spec.id]
        if plan.fails_at == 0:
            raise CheckpointUnreadable("chaos")
        step = self.saved.get(spec.id, 0)

        def start() -> JobStarted:
            if not self._runs:
                self._idle_since = max(self._idle_since, self.clock())
            self._runs[spec.id] = _Run(spec, step, tried=step)
            self.ran[spec.id] = []
            return JobStarted(id=spec.id, total_steps=plan.steps, resumed_from=step)

        return start

    def preparation(self, job: str) -> Callable[[Cancellation], None] | None:
        return None

    def advance(
        self, job: str, micro_steps: int | None, others: Sequence[str] = (), shared_tokens: int | None = None
    ) -> list[FromEngine]:
        one = self._runs[job].shared or self._begin(job, others, shared_tokens)
        suspended = [id for id, run in self._runs.items() if run.shared]
        assert set(suspended) == set(one.jobs), f"{suspended} suspended while {one.jobs} train"
        self.trained = tuple(one.jobs)
        self.gaps.append(self.clock() - self._idle_since)
        kinds = one.kinds[one.done :]
        alike = next((i for i, kind in enumerate(kinds) if kind is not kinds[0]), len(kinds))
        done = len(kinds) if micro_steps is None else min(micro_steps, alike)
        self.micro_steps_done = done
        factor = 10 if self.rng.random() < self.prices.spikes else 1
        share = 1.0 if self.batch_rows is None else sum(rows or 0 for rows in one.rows.values()) / self.batch_rows
        cost = factor * share * sum(self.cost(kind) for kind in kinds[:done])
        self.meter.charge("train", cost)
        self._idle_since = max(self._idle_since, self.clock()) + cost
        one.done += done
        if one.done < len(one.kinds):
            return []
        return [message for id in one.jobs for message in self._end_of_pass(self._runs[id])]

    def _begin(self, job: str, others: Sequence[str], shared_tokens: int | None) -> FakePass:
        run, plan = self._runs[job], self.plans[job]
        able = [id for id in others if id != job and self.plans[id].rows is not None and not self._runs[id].evaluates]
        joining = list[str]()
        if plan.rows is not None and not run.evaluates and self.batch_rows is not None:
            limits = BatchLimits(1 << 20 if shared_tokens is None else shared_tokens, self.batch_rows)
            joining = companions(_size(plan.rows), [(id, _size(self.plans[id].rows or 0)) for id in able], limits)
        jobs = [job, *joining]
        one = FakePass(jobs, {id: self.plans[id].rows for id in jobs}, self.kinds(plan), evaluation=run.evaluates)
        self.passes.append(one)
        for id in jobs:
            assert self._runs[id].shared is None, f"{id} joins twice"
            self._runs[id].shared = one
        return one

    def _end_of_pass(self, run: _Run) -> list[FromEngine]:
        plan, run.shared = self.plans[run.spec.id], None
        if not run.evaluates:
            run.step += 1
            self.ran[run.spec.id].append(run.step)
            if plan.evaluate_every is not None and run.step % plan.evaluate_every == 0:
                run.evaluates = True
                return []
        run.evaluates = False
        return self._end_of_step(run, plan)

    def cost(self, kind: MicroStep) -> float:
        """Virtual seconds of a micro-step."""
        return self.prices.micro_step

    def kinds(self, plan: JobPlan) -> list[MicroStep]:
        """Of the micro-steps of an optimizer step."""
        return [_kind(micro_step, plan.micro_steps) for micro_step in range(plan.micro_steps)]

    def next_micro_step(self, job: str) -> MicroStep:
        one = self._runs[job].shared
        return MicroStep.BEGIN if one is None else one.kinds[one.done]

    def micro_batch_tokens(self, job: str) -> int:
        one = self._runs[job].shared
        rows = [] if one is None else [own for own in one.rows.values() if own is not None]
        return _size(sum(rows)).tokens if rows else ROW_TOKENS

    def _end_of_step(self, run: _Run, plan: JobPlan) -> list[FromEngine]:
        if run.step == plan.fails_at:
            return [JobFailed(id=run.spec.id, code="non_finite_loss", message="chaos")]
        return [JobProgress(id=run.spec.id, metrics=_metrics(run.step, plan.steps))]

    notes: tuple[str, ...] = ()

    def mid_batch(self, job: str) -> bool:
        return self._runs[job].shared is not None

    def finished(self, job: str) -> bool:
        return self._runs[job].step == self.plans[job].steps and not self._runs[job].evaluates

    def checkpoint_due(self, job: str) -> bool:
        run = self._runs[job]
        return run.step > run.tried and run.step % self.plans[job].checkpoint_every == 0 and not run.evaluates

    def checkpoint(self, job: str) -> Callable[[], JobCheckpoint] | None:
        self.abandon(job)
        run = self._runs[job]
        step = run.tried = run.step - run.evaluates  # a step ends with its evaluation
        if step == self.saved.get(job, 0):
            return None

        def save() -> JobCheckpoint:
            self.saved[job] = step
            return JobCheckpoint(id=job, step=step)

        return self._writes("write", job, save)

    def snapshot_due(self, job: str) -> bool:
        run = self._runs[job]
        if self.sample_every is None or run.evaluates or run.step in (0, run.snapshot):
            return False
        return run.step % self.sample_every == 0 or self.finished(job)

    def snapshot(self, job: str) -> Callable[[], Callable[[], JobSnapshot | JobNote]]:
        run = self._runs[job]
        step = run.snapshot = run.step
        taken = JobSnapshot(id=job, step=step, ref=AdapterRef(f"{job}:snapshot", step))
        return self._writes("snapshot", job, lambda: lambda: taken)

    def abandon(self, job: str, *, finish_update: bool = False) -> None:
        run = self._runs[job]
        if run.shared is not None:
            run.shared.jobs.remove(job)
        run.shared = None

    def publication(self, job: str) -> Callable[[], Callable[[], JobSucceeded | JobWaiting]]:
        run = self._runs[job]

        def publish() -> JobSucceeded:
            self.published.append(job)
            return JobSucceeded(id=job, ref=AdapterRef(run.spec.adapter, run.spec.version))

        return self._writes("publish", job, lambda: publish)

    def on_a_thread(self, operation: str, job: str) -> None:
        """Called where a checkpoint ("write") or an adapter ("publish") is written."""

    def _writes(self, operation: str, job: str, work: Callable[[], T]) -> Callable[[], T]:
        assert job not in self.writing, f"{job} writes two things at once"
        self.writing.add(job)

        def write() -> T:
            try:
                self.on_a_thread(operation, job)
                return work()
            finally:
                self.writing.discard(job)

        return write

    def limit(self, job: str, treatment: Treatment) -> None:
        assert job in self._runs, f"{job} is not loaded"
        self.limits[job] = treatment

    def limit_shared(self, tokens: int | None) -> None:
        """Jobs share by their rows here."""

    def drop(self, job: str) -> None:
        assert job not in self.writing, f"{job} is dropped while it is written"
        self.abandon(job)
        del self._runs[job]

    def holds_memory_of(self, job: str) -> bool:
        return any(run.shared is not None and job in run.shared.rows for run in self._runs.values())

    def release_memory(self) -> bool:
        """Nothing here holds memory that it can do without."""
        return False

    @property
    def active(self) -> int:
        return len(self._runs)


def _kind(micro_step: int, micro_steps: int) -> MicroStep:
    if micro_step == 0:
        return MicroStep.BEGIN
    if micro_step + 1 == micro_steps:
        return MicroStep.OPTIMIZER
    return MicroStep.FORWARD if micro_step < micro_steps // 2 else MicroStep.BACKWARD


def _metrics(step: int, total: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        total_steps=total,
        epoch=step / total,
        loss=1.0,
        learning_rate=1e-3,
        grad_norm=1.0,
        tokens=1,
        target_tokens=1,
        seconds=0.1,
    )


class Inline(Executor):
    """Threads that are none: what is submitted runs at once. Virtual time knows no threads."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - a future keeps any
            future.set_exception(error)
        return future


class NoAdapters:
    """An adapter store in which every adapter is in memory."""

    waiting = 0
    troubles: tuple[str, ...] = ()

    def notify(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def ready(self, request: Queued) -> bool:
        return True

    def next_arrived(self) -> Queued | None:
        return None

    def failed(self) -> list[tuple[Queued, Exception]]:
        return []

    def cancel(self, id: str) -> bool:
        return False

    def drop(self, ref: AdapterRef) -> None:
        """Nothing is kept."""

    def size(self, ref: AdapterRef) -> int:
        return 0

    def resident(self) -> tuple[AdapterRef, ...]:
        return ()

    def close(self) -> None:
        """Nothing is read."""


class AdaptersOnDisk(AdapterStore):
    """`changed` is what the engine was to be told by."""

    def notify(self, changed: Callable[[], None]) -> None:
        self.changed = changed
        super().notify(changed)


def adapters_on_disk(budget: int, came: Callable[[], None]) -> AdaptersOnDisk:
    """A store that keeps `budget` idle adapters in memory. `came` is called whenever one was read."""

    def load(ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        came()
        return LoraWeights(LoraSettings(), {})

    return AdaptersOnDisk(load, HostBudget(budget))
