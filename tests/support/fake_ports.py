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

from coserve.admission.recompute_plan import RecomputePlan
from coserve.core.cancellation import Cancellation
from coserve.core.errors import CheckpointUnreadable, PromptTooLong, failure_text
from coserve.core.gpu_memory import TrainingCosts
from coserve.core.link import jobs
from coserve.core.link.generation import Generate, RequestFailed, Tokens
from coserve.core.link.link import FromEngine
from coserve.core.link.stats import AllocatorStats, TrainingBatches
from coserve.core.training.jobs import JobSpec
from coserve.core.training.micro_step import MicroStep
from coserve.core.types import AdapterDigests, AdapterRef, LoraSettings
from coserve.finetune.memory_limits import BatchLimits, Size, companions
from coserve.generate.plan import Ran, Scheduled, step_shape
from coserve.generate.schedule import Scheduler
from coserve.lora.store.pages import Activated
from coserve.lora.store.reads import LoadTimes
from coserve.lora.store.store import AdapterStore
from coserve.model.lora import LoraWeights
from coserve.queues.request import Request, State
from coserve.queues.shapes import StepShape
from tests.support.pages import BareAdapters, BarePages
from tests.support.records import make_metrics
from tests.support.sized_adapters import room_for, sized

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
    """Virtual seconds: a generation step, each of its tokens, a training micro-step; `spikes`: share of ten-fold
    steps."""

    step: float
    token: float
    micro_step: float
    spikes: float


FREE = Prices(step=0.0, token=0.0, micro_step=0.0, spikes=0.0)


class Pages(BarePages):
    """As many as asked for, without tensors. Who grows finds none now and then (`refuses`), so that the latest give
    way."""

    def __init__(self, refuses: Callable[[], bool]) -> None:
        super().__init__(1, 16)
        self._refuses, self._counted = refuses, False

    @property
    def free_pages(self) -> int:
        self._counted = True
        return 1 << 30

    def allocate(self, n: int) -> list[int] | None:
        counted, self._counted = self._counted, False
        return None if not counted and self._refuses() else [0] * n

    def free(self, pages: Sequence[int]) -> None:
        """Nobody counts them."""


class Adapters(BareAdapters):
    """Those of a store, as the scheduler sees them, in no pages. While `lost`, none can be activated, and all are being
    read again."""

    def __init__(self, store: NoAdapters | AdapterStore) -> None:
        super().__init__()
        self.store, self.lost = store, False
        self.arrived, self.ready, self.waited, self.failure = store.arrived, store.ready, store.waited, store.failure

    def reading(self, ref: AdapterRef) -> bool:
        return self.lost or self.store.reading(ref)

    def size(self, ref: AdapterRef) -> int:
        return 0

    def to_copy(self, ref: AdapterRef) -> int:
        return 0

    def activate(self, ref: AdapterRef) -> Activated | None:
        return None if self.lost else Activated(LoraWeights(LoraSettings(), {}), {})


@dataclass
class Launched:
    """A step of the device: `wait` until it is computed, then the requests in `sampled` have their next tokens."""

    wait: Callable[[], None]
    sampled: list[Request]
    shape: StepShape


class FakeGenerator:
    """Runs the steps of a real scheduler. Now and then requests give way or fail (`chaos`), or adapters are lost: until
    they were read again (`read` is called then), no request that has one becomes active."""

    overlaps = False
    """A step's tokens come with the next step, or with `collect`."""

    def __init__(
        self,
        meter: Meter,
        prices: Prices,
        step_tokens: int,
        rng: random.Random,
        chaos: float,
        *,
        max_running: int = 4,
        max_queue: int = 8,
        fair: bool = True,
        store: NoAdapters | AdapterStore | None = None,
    ) -> None:
        self._meter, self._prices, self._rng, self._chaos = meter, prices, rng, chaos
        self.adapters = Adapters(store or NoAdapters())
        self.scheduler = Scheduler(
            Pages(self._lacks_pages),
            self.adapters,
            max_running=max_running,
            step_tokens=step_tokens,
            max_queue=max_queue,
            fair=fair,
            prepare=self.set_up,
            failed=self._refuse,
        )
        self._in_flight: list[Launched] = []
        self._failed: list[RequestFailed] = []
        self.admitted: dict[str, float] = {}
        self.troubles: tuple[str, ...] = ()
        self.pages_total = 1 << 20
        self.adapter_pages = self.graphs_missing = 0
        self.tokens_computed = 0
        """Tokens, in all steps."""
        self.read: Callable[[], None] = lambda: None

    @property
    def in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def running(self) -> int:
        return len(self.scheduler)

    @property
    def pages_used(self) -> int:
        return sum(request.computed for request in self.scheduler.requests.values())

    def allocator(self) -> AllocatorStats:
        return AllocatorStats()

    def prepare(self) -> bool:
        return False

    # ---- requests

    def set_up(self, request: Request) -> None:
        assert request.id not in self.admitted, f"{request.id} was admitted twice"
        self.admitted[request.id] = asyncio.get_running_loop().time()
        if len(request.message.prompt) > CONTEXT:
            raise PromptTooLong(f"expected at most {CONTEXT} tokens, got {len(request.message.prompt)}")
        if request.adapter is not None:
            self.adapters.store.acquire(request.adapter)

    def _refuse(self, request: Request, error: Exception) -> None:
        if request.state is State.ACTIVE:
            self._end(request)
        code, message = failure_text(error)
        self._failed.append(RequestFailed(id=request.id, code=code, message=message))

    def take_failed(self) -> list[RequestFailed]:
        failed, self._failed = self._failed, []
        return failed

    def cancel(self, id: str) -> None:
        if (request := self.scheduler.requests.get(id)) is not None:  # it may have ended in the step that runs
            self._end(request)

    def _end(self, request: Request) -> None:
        acquired = request.state is State.ACTIVE
        self.scheduler.remove(request)
        if acquired and request.adapter is not None:
            self.adapters.store.release(request.adapter)

    # ---- steps

    def run(self, scheduled: Sequence[Scheduled]) -> Ran:
        started = [item.request for item in scheduled if not item.request.started]
        for request in started:
            request.started = True
        launched = [self._launch(scheduled)] if scheduled else []
        found = self.collect()
        if self.overlaps:
            self._in_flight = launched
        elif launched:
            found = Ran([*found.messages, *self._collect(launched[0]), *self.take_failed()], {}, launched[0].shape)
        return found._replace(started={request.id: request.cached for request in started})

    def collect(self) -> Ran:
        steps, self._in_flight = self._in_flight, []
        messages = [message for step in steps for message in self._collect(step)]
        return Ran([*messages, *self.take_failed()], {}, steps[0].shape if steps else None)

    def _launch(self, scheduled: Sequence[Scheduled]) -> Launched:
        shape = step_shape(scheduled, self.adapters.size, alone=self.overlaps and not self._in_flight)
        sampled = [item.request for item in scheduled if item.tokens == item.request.pending]
        spent = sum(item.tokens for item in scheduled)
        self.tokens_computed += spent
        for item in scheduled:
            item.request.computed += item.tokens
        for request in sampled:
            request.in_flight += 1
        self.scheduler.changed()
        self._lose_adapters()
        return Launched(self._compute(shape, spent), sampled, shape)

    def _compute(self, shape: StepShape, tokens: int) -> Callable[[], None]:
        """Give the device a step of so many tokens. Waits for its end."""
        factor = 10 if self._rng.random() < self._prices.spikes else 1
        self._meter.charge("serve", factor * (self._prices.step + tokens * self._prices.token))
        return lambda: None

    def _collect(self, step: Launched) -> list[Tokens | RequestFailed]:
        step.wait()
        self.scheduler.changed()
        return [self._next(request) for request in step.sampled if request.state is State.ACTIVE]

    def _next(self, request: Request) -> Tokens | RequestFailed:
        request.in_flight -= 1
        if self._rng.random() < self._chaos / 4:
            self._end(request)
            return RequestFailed(id=request.id, code="internal_error", message="chaos")
        made = token(request.message, request.generated)
        finished = request.push(made)
        if finished:
            self._end(request)
        return Tokens(id=request.id, tokens=(made,), finished=finished)

    def _lacks_pages(self) -> bool:
        several = sum(bool(request.pages) for request in self.scheduler.requests.values()) > 1
        return several and self._rng.random() < 5 * self._chaos

    def _lose_adapters(self) -> None:
        if not self.adapters.lost and self._rng.random() < self._chaos:
            self.adapters.lost = True
            asyncio.get_running_loop().call_later(self._rng.expovariate(5), self._find)

    def _find(self) -> None:
        self.adapters.lost = False
        self.read()


@dataclass(frozen=True)
class JobPlan:
    """How a fake job goes. A step is one micro-batch of `micro_steps` micro-steps; `fails_at` is a step, 0 refuses the
    start."""

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
    """Runs the plans. `ran` is each job's steps, in order, since its last (re)start. Jobs share micro-batches of at
    most `batch_rows` rows, as the real trainer chooses them; a micro-step of so many rows costs `Prices.micro_step`,
    fewer rows less."""

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
    limits: dict[str, RecomputePlan] = field(default_factory=dict)
    """The last `limit` of each job."""
    layer_costs: TrainingCosts | None = None
    """Of compiled layers."""
    sample_every: int | None = None
    """Steps between two snapshots of a job."""
    _runs: dict[str, _Run] = field(default_factory=dict)
    _idle_since: float = 0.0

    def load(self, spec: JobSpec, cancellation: Cancellation) -> Callable[[], jobs.JobStarted]:
        assert spec.id not in self._runs, f"{spec.id} started twice"
        assert spec.id not in self.published, f"{spec.id} started after its end"
        plan = self.plans[spec.id]
        if plan.fails_at == 0:
            raise CheckpointUnreadable("chaos")
        step = self.saved.get(spec.id, 0)

        def start() -> jobs.JobStarted:
            if not self._runs:
                self._idle_since = max(self._idle_since, self.clock())
            self._runs[spec.id] = _Run(spec, step, tried=step)
            self.ran[spec.id] = []
            return jobs.JobStarted(id=spec.id, total_steps=plan.steps, resumed_from=step)

        return start

    def preparation(self, job: str) -> Callable[[Cancellation], None] | None:
        return None

    def advance(
        self, job: str, micro_steps: int | None, others: Sequence[str] = (), shared_tokens: int | None = None
    ) -> list[FromEngine]:
        kinds = self._kinds_left(job)
        alike = next((i for i, kind in enumerate(kinds) if kind is not kinds[0]), len(kinds))
        self.micro_steps_done = done = len(kinds) if micro_steps is None else min(micro_steps, alike)
        self.before_slice(job, kinds[:done])
        one = self._runs[job].shared or self._begin(job, others, shared_tokens)
        suspended = [id for id, run in self._runs.items() if run.shared]
        assert set(suspended) == set(one.jobs), f"{suspended} suspended while {one.jobs} train"
        self.trained = tuple(one.jobs)
        self.gaps.append(self.clock() - self._idle_since)
        factor = 10 if self.rng.random() < self.prices.spikes else 1
        share = 1.0 if self.batch_rows is None else sum(rows or 0 for rows in one.rows.values()) / self.batch_rows
        cost = factor * share * sum(self.cost(kind) for kind in kinds[:done])
        self.meter.charge("train", cost)
        self._idle_since = max(self._idle_since, self.clock()) + cost
        one.done += done
        if one.done < len(one.kinds):
            return []
        return [message for id in one.jobs for message in self._end_of_pass(self._runs[id])]

    def before_slice(self, job: str, kinds: Sequence[MicroStep]) -> None:
        """Called before a slice of these micro-steps, the first of them `kinds[0]`, changes anything."""

    def _kinds_left(self, job: str) -> list[MicroStep]:
        """Of the job's micro-batch, which may not have begun."""
        one = self._runs[job].shared
        return self.kinds(self.plans[job]) if one is None else one.kinds[one.done :]

    def _begin(self, job: str, others: Sequence[str], shared_tokens: int | None) -> FakePass:
        run, plan = self._runs[job], self.plans[job]
        able = [id for id in others if id != job and self.plans[id].rows is not None and not self._runs[id].evaluates]
        joining = list[str]()
        if plan.rows is not None and not run.evaluates and self.batch_rows is not None:
            limits = BatchLimits(1 << 20 if shared_tokens is None else shared_tokens, self.batch_rows)
            joining = companions(_size(plan.rows), [(id, _size(self.plans[id].rows or 0)) for id in able], limits)
        together = [job, *joining]
        one = FakePass(
            together, {id: self.plans[id].rows for id in together}, self.kinds(plan), evaluation=run.evaluates
        )
        self.passes.append(one)
        for id in together:
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
        return self._kinds_left(job)[0]

    def micro_batch_tokens(self, job: str) -> int:
        one = self._runs[job].shared
        rows = [] if one is None else [own for own in one.rows.values() if own is not None]
        return _size(sum(rows)).tokens if rows else ROW_TOKENS

    def _end_of_step(self, run: _Run, plan: JobPlan) -> list[FromEngine]:
        if run.step == plan.fails_at:
            return [jobs.JobFailed(id=run.spec.id, code="non_finite_loss", message="chaos")]
        return [jobs.JobProgress(id=run.spec.id, metrics=make_metrics(run.step, plan.steps, tokens=1, target_tokens=1))]

    notes: tuple[str, ...] = ()

    def mid_batch(self, job: str) -> bool:
        return self._runs[job].shared is not None

    def finished(self, job: str) -> bool:
        return self._runs[job].step == self.plans[job].steps and not self._runs[job].evaluates

    def checkpoint_due(self, job: str) -> bool:
        run = self._runs[job]
        return run.step > run.tried and run.step % self.plans[job].checkpoint_every == 0 and not run.evaluates

    def checkpoint(self, job: str) -> Callable[[], jobs.JobCheckpoint] | None:
        self.abandon(job)
        run = self._runs[job]
        step = run.tried = run.step - run.evaluates  # a step ends with its evaluation
        if step == self.saved.get(job, 0):
            return None

        def save() -> jobs.JobCheckpoint:
            self.saved[job] = step
            return jobs.JobCheckpoint(id=job, step=step)

        return self._writes("write", job, save)

    def snapshot_due(self, job: str) -> bool:
        run = self._runs[job]
        if self.sample_every is None or run.evaluates or run.step in (0, run.snapshot):
            return False
        return run.step % self.sample_every == 0 or self.finished(job)

    def snapshot(self, job: str) -> Callable[[], Callable[[], jobs.JobSnapshot | jobs.JobNote]]:
        run = self._runs[job]
        step = run.snapshot = run.step
        taken = jobs.JobSnapshot(id=job, step=step, ref=AdapterRef(f"{job}:snapshot", step))
        return self._writes("snapshot", job, lambda: lambda: taken)

    def abandon(self, job: str, *, finish_update: bool = False) -> None:
        run = self._runs[job]
        if run.shared is not None:
            run.shared.jobs.remove(job)
        run.shared = None

    def publication(self, job: str) -> Callable[[], Callable[[], jobs.JobSucceeded | jobs.JobWaiting]]:
        run = self._runs[job]

        def publish() -> jobs.JobSucceeded:
            self.published.append(job)
            return jobs.JobSucceeded(id=job, ref=AdapterRef(run.spec.adapter, run.spec.version))

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

    def limit(self, job: str, recompute_plan: RecomputePlan) -> None:
        assert job in self._runs, f"{job} is not loaded"
        self.limits[job] = recompute_plan

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

    lora_servers = ()
    troubles: tuple[str, ...] = ()
    host_bytes = 0

    def __init__(self) -> None:
        self.times = LoadTimes()

    def notify(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def arrived(self, ref: AdapterRef, digests: AdapterDigests | None = None) -> None:
        """Nothing is read."""

    def pin(self, ref: AdapterRef, digests: AdapterDigests | None = None, *, pinned: bool) -> None:
        """Everything stays."""

    def ready(self, ref: AdapterRef, digests: AdapterDigests | None) -> bool:
        return True

    def waited(self, ref: AdapterRef) -> None:
        raise AssertionError(ref)

    def failure(self, ref: AdapterRef) -> Exception | None:
        return None

    def reading(self, ref: AdapterRef) -> bool:
        return False

    def acquire(self, ref: AdapterRef) -> LoraWeights:
        return LoraWeights(LoraSettings(), {})

    def release(self, ref: AdapterRef) -> None:
        """Nothing is kept."""

    def drop(self, ref: AdapterRef) -> None:
        """Nothing is kept."""

    def prefetch(self, ref: AdapterRef, digests: AdapterDigests | None = None) -> None:
        """Nothing is read."""

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
        return sized()

    return AdaptersOnDisk(load, room_for(budget))
