"""The tick: ask the policy, do what it says, hand the results back.

The engine knows neither HTTP nor text nor the registry. Requests and jobs come in as messages over a `Link`, tokens and
the events of jobs go out the same way. All state changes happen on the event loop between two ticks, so that a
generation step or a fine-tuning slice never sees its batch change.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

from coserve.errors import CoserveError, EngineUnavailable, QueueFull
from coserve.fetches import Fetches
from coserve.link import (
    Admitted,
    CancelJob,
    CancelRequest,
    DropAdapter,
    EngineNotes,
    EngineStats,
    EngineStopped,
    FromEngine,
    Generate,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobSucceeded,
    Link,
    PauseJob,
    RequestFailed,
    ResumeJob,
    Shutdown,
    StartJob,
    ToEngine,
    Tokens,
)
from coserve.queues.finetune import JobQueue
from coserve.queues.inference import InferenceQueue, Queued
from coserve.queues.policy import Costs, Policy, Running, Serve, Train, View, Wait, Waiting
from coserve.rooms import Adapters, Average, Generates, Trains, Upgrades
from coserve.state.failpoints import failpoint
from coserve.types import JobSpec

log = logging.getLogger(__name__)

STATS_INTERVAL = 1.0
PREPARATION = 0.5
"""Seconds: longer than a piece of `Generates.prepare`."""


@dataclass
class _Clocked:
    """A running request's promise: when its next token is due, and about how many steps it takes until then."""

    tpot: float
    due: float
    steps: int


async def _yield_to_loop() -> None:
    """Let the link deliver what has come in: a frame takes a read, a wake-up and a decode."""
    for _ in range(3):
        await asyncio.sleep(0)


class Engine:
    """One base, one GPU, one loop.

    `clock` gives seconds; `pace` runs after each step (the simulation spends the step's virtual time in it).
    """

    def __init__(
        self,
        generator: Generates,
        trainer: Trains,
        adapters: Adapters,
        policy: Policy,
        link: Link[FromEngine, ToEngine],
        *,
        max_running: int,
        max_queue: int,
        fair: bool,
        max_active_jobs: int,
        step_tokens: int,
        clock: Callable[[], float],
        planned_bytes: int = 0,
        pace: Callable[[], Awaitable[None]] = _yield_to_loop,
        upgrade: Upgrades | None = None,
    ) -> None:
        self._generator, self._trainer, self._adapters = generator, trainer, adapters
        self._policy, self._link = policy, link
        self._max_running, self._max_active_jobs = max_running, max_active_jobs
        self._step_tokens = step_tokens
        self._clock, self._pace, self._upgrade = clock, pace, upgrade
        self._planned_bytes = planned_bytes
        self._queue = InferenceQueue(max_queue, fair=fair)
        self._seen: tuple[tuple[Queued, ...], tuple[Waiting, ...]] = (), ()
        self._running: dict[str, _Clocked] = {}
        self._jobs = JobQueue()
        self._active: dict[str, JobSpec] = {}
        self._pending: deque[JobSpec] = deque()
        self._paused: dict[str, JobSpec] = {}
        self._changed = asyncio.Event()
        self._fetches = Fetches(adapters, self._changed.set)
        self._stopping = False
        self._serve_cost, self._piece_cost = Average(), Average()
        self._serve_seconds = self._train_seconds = 0.0
        self._batches_since_train = 0
        self._train_waiting_since: float | None = None
        self._stats_due = 0.0

    async def run(self) -> None:
        """Tick until `Shutdown` comes or the API process is gone."""
        beside = [asyncio.create_task(self._receive())]
        if self._upgrade is not None:
            beside.append(asyncio.create_task(self._take_up(self._upgrade)))
        for task in beside:
            task.add_done_callback(lambda _: self._changed.set())
        try:
            while not (self._stopping or beside[0].done()):
                self._activate_jobs()
                for request in self._fetches.arrived():
                    self._admit(request)
                await self._tick(self._clock())
                for task in beside:
                    if task.done():
                        task.result()  # a fault in a message's handling must not leave the engine deaf
        finally:
            for task in beside:
                task.cancel()
            self._fetches.close()
        failpoint("shutdown")
        self._checkpoint_active()
        self._link.send(EngineStopped())

    async def _tick(self, now: float) -> None:
        match self._policy.decide(self._view(), now):
            case Serve(admit):
                await self._serve(admit)
            case Train(job, pieces):
                await self._train(job, pieces)
            case Wait(until) if self._idle_until(until, now) and self._generator.prepare():
                await self._pace()
            case Wait(until):
                self._report(now, force=True)
                await self._wait(None if until is None else until - now)

    def _idle_until(self, until: float | None, now: float) -> bool:
        """Whether nothing is about to come."""
        return not self._fetches and (until is None or until - now > PREPARATION)

    async def _take_up(self, upgrade: Upgrades) -> None:
        """Compile on a thread, which nobody waits for at the end, and go on with what came out."""
        executor = ThreadPoolExecutor(1, "compile")
        compiled = asyncio.get_running_loop().run_in_executor(executor, upgrade.compile)
        executor.shutdown(wait=False)
        await compiled
        self._link.send(EngineNotes(notes=upgrade.adopt()))

    # ---- the two kinds of work

    async def _serve(self, admit: int) -> None:
        began = self._clock()
        if admit and not self._running:
            self._batches_since_train += 1
        for request in self._queue.take(admit):
            if not self._fetches.take(request):
                self._admit(request)
        if not self._running:  # all were refused, or wait for their adapters
            await (self._wait(None) if self._fetches and not self._jobs.ready() else self._pace())
            return
        results = self._generator.step()
        failpoint("generate.mid_stream")
        await self._pace()
        now = self._clock()
        self._serve_cost.add(now - began)
        self._serve_seconds += now - began
        self._emit_tokens(results, now)
        self._report(now)

    def _admit(self, entry: Queued) -> None:
        request = entry.message
        try:
            self._generator.add(request)
        except CoserveError as error:
            self._link.send(RequestFailed(id=request.id, code=error.code, message=error.message))
        else:
            steps = math.ceil(len(request.prompt) / self._step_tokens)
            self._running[request.id] = _Clocked(request.slo.tpot, entry.deadline, steps)
            self._link.send(Admitted(id=request.id))

    def _emit_tokens(self, messages: Sequence[Tokens | RequestFailed], now: float) -> None:
        wanted: list[FromEngine] = []
        for message in messages:
            promise = self._running.get(message.id)
            if promise is None:
                continue  # cancelled while the step ran
            if isinstance(message, RequestFailed) or message.finished is not None:
                del self._running[message.id]
            elif message.tokens:  # pieces of a prompt's scores bring none
                promise.due = now + promise.tpot
                promise.steps = 1
            wanted.append(message)
        self._link.send_all(wanted)

    async def _train(self, job: str, pieces: int | None) -> None:
        # Chosen already: they need not wait for the slice.
        self._emit_tokens(self._generator.land(), self._clock())
        began = self._clock()
        # Told before the loop breathes: a pause or a cancel that comes in then must not unsay what is durable.
        for message in self._trainer.advance(job, pieces):
            self._link.send(message)
            if isinstance(message, JobSucceeded | JobFailed):
                self._retire(job)
        suspended = job in self._active and self._trainer.mid_batch(job)
        if not suspended:
            self._batches_since_train = 0
            if job in self._active:
                self._jobs.rotate()
        await self._pace()
        now = self._clock()
        piece = (now - began) / (pieces or 1)
        if suspended or piece > self._piece_cost.value:  # where a micro-batch ends, the slice may have had fewer pieces
            self._piece_cost.add(piece)
        self._train_seconds += now - began
        self._train_waiting_since = now
        self._report(now)

    async def _wait(self, seconds: float | None) -> None:
        """Sleep until a message changes something, or `seconds` have passed."""
        if seconds is not None and seconds <= 0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    # ---- what the policy sees

    def _view(self) -> View:
        jobs = self._jobs.ready()
        if not jobs:
            self._train_waiting_since = None
        elif self._train_waiting_since is None:
            self._train_waiting_since = self._clock()
        return View(
            waiting=self._waiting(),
            running=tuple(Running(id, promise.due, promise.steps) for id, promise in self._running.items()),
            room=max(0, self._max_running - len(self._running) - len(self._fetches)),
            jobs=jobs,
            mid_batch=bool(jobs) and self._trainer.mid_batch(jobs[0]),
            batches_since_train=self._batches_since_train,
            train_waiting_since=self._train_waiting_since,
            costs=Costs(serve=self._serve_cost.value, piece=self._piece_cost.value),
        )

    def _waiting(self) -> tuple[Waiting, ...]:
        """The queue in its order; a prompt's steps count those of the prompts before it."""
        entries = self._queue.waiting()
        if entries is not self._seen[0]:  # made anew only where something changed: the queue may be long
            tokens = accumulate(len(entry.message.prompt) for entry in entries)
            waiting = tuple(
                Waiting(entry.message.id, entry.arrived, entry.deadline, math.ceil(total / self._step_tokens))
                for entry, total in zip(entries, tokens, strict=True)
            )
            self._seen = entries, waiting
        return self._seen[1]

    # ---- messages

    async def _receive(self) -> None:
        while True:
            try:
                message = await self._link.receive()
            except EngineUnavailable:
                log.info("the API process is gone")
                self._stopping = True
                self._changed.set()
                return
            self._handle(message)
            self._changed.set()

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Generate():
                self._enqueue(message)
            case CancelRequest(id=id):
                if not (self._queue.cancel(id) or self._fetches.cancel(id)) and id in self._running:
                    del self._running[id]
                    self._generator.cancel(id)
            case StartJob(spec=spec, paused=paused):
                self._place(spec, paused=paused)
            case PauseJob(id=id):
                self._pause(id)
            case ResumeJob(id=id):
                if id in self._paused:
                    self._pending.append(self._paused.pop(id))
            case CancelJob(id=id):
                self._cancel_job(id)
            case DropAdapter(ref=ref):
                self._adapters.drop(ref)
                self._fetches.delete(ref)
            case Shutdown():
                self._stopping = True

    def _enqueue(self, request: Generate) -> None:
        now = self._clock()
        try:
            displaced = self._queue.push(request, arrived=now, deadline=now + request.slo.ttft)
        except QueueFull as error:
            self._refuse(request, error)
        else:
            if displaced is not None:
                why = "the queue is full, and most of it is of this adapter; try again later"
                self._refuse(displaced.message, QueueFull(why, retry_after=self._queue.retry_after(now)))

    def _refuse(self, request: Generate, error: QueueFull) -> None:
        self._link.send(
            RequestFailed(id=request.id, code=error.code, message=error.message, retry_after=error.retry_after)
        )

    # ---- jobs

    def _place(self, spec: JobSpec, *, paused: bool) -> None:
        if paused:
            self._paused[spec.id] = spec
        else:
            self._pending.append(spec)

    def _activate_jobs(self) -> None:
        """Start waiting jobs, first come first served, while there is room for them."""
        while self._pending and len(self._active) < self._max_active_jobs:
            spec = self._pending.popleft()
            try:
                started = self._trainer.start(spec)
            except CoserveError as error:
                self._link.send(JobFailed(id=spec.id, code=error.code, message=error.message))
                continue
            self._active[spec.id] = spec
            self._jobs.add(spec.id)
            self._link.send(started)

    def _retire(self, job: str) -> JobSpec:
        self._jobs.remove(job)
        self._trainer.drop(job)
        return self._active.pop(job)

    def _withdraw(self, job: str) -> JobSpec | None:
        """Take a waiting job out of the line."""
        for spec in self._pending:
            if spec.id == job:
                self._pending.remove(spec)
                return spec
        return None

    def _pause(self, job: str) -> None:
        if job in self._active:
            self._save(job)
            spec = self._retire(job)
        elif (waiting := self._withdraw(job)) is not None:
            spec = waiting
        else:
            return
        self._paused[job] = spec
        self._link.send(JobPaused(id=job))

    def _cancel_job(self, job: str) -> None:
        if job in self._active:
            self._retire(job)
        elif self._paused.pop(job, None) is None and self._withdraw(job) is None:
            return
        self._link.send(JobCancelled(id=job))

    def _save(self, job: str) -> None:
        """A checkpoint at a pause or at the end; one that fails costs the steps since the last, never the job."""
        try:
            saved = self._trainer.checkpoint(job)
        except CoserveError as error:
            log.warning("job %s: no checkpoint: %s", job, error.message)
            return
        if saved is not None:
            self._link.send(saved)

    def _checkpoint_active(self) -> None:
        for job in tuple(self._active):
            self._save(job)

    # ---- gauges

    def _report(self, now: float, *, force: bool = False) -> None:
        if now < self._stats_due and not force:
            return
        self._stats_due = now + STATS_INTERVAL
        self._link.send(
            EngineStats(
                waiting=len(self._queue) + len(self._fetches),
                running=len(self._running),
                jobs=len(self._active) + len(self._pending),
                pages_used=self._generator.pages_used,
                pages_total=self._generator.pages_total,
                pages_adapters=self._generator.adapter_pages,
                memory_planned=self._planned_bytes,
                memory_peak=self._generator.memory_peak,
                preemptions=self._generator.preemptions,
                prefix_queries=self._generator.prefix_queries,
                prefix_hits=self._generator.prefix_hits,
                resident=self._adapters.resident(),
                serve_seconds=self._serve_seconds,
                train_seconds=self._train_seconds,
            )
        )
