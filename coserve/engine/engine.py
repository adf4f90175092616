"""The tick: ask the policy, do what it says, hand the results back.

The engine knows neither HTTP nor text nor the registry. Requests and jobs come in as messages over a `Link`, tokens and
the events of jobs go out the same way. All state changes happen on the event loop between two ticks, so that a
generation step or a fine-tuning slice never sees its batch change.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext, suppress

from coserve.engine.device_memory import DeviceMemory
from coserve.engine.gauges import STATS_INTERVAL, Reports
from coserve.engine.idle import Idle
from coserve.engine.inbox import Inbox
from coserve.engine.job_runner import JobRunner
from coserve.engine.ports import Generates, StoresAdapters, Trains
from coserve.engine.reception import Reception
from coserve.engine.running import RunningRequests
from coserve.engine.spatial.slices_in_flight import Between, EndedSlice, LaunchedStep, Mark, SlicesInFlight
from coserve.engine.stalls import Stalls
from coserve.engine.views import Views
from coserve.errors import CoserveError, EngineFault, failure_text
from coserve.garbage import GarbageCollection
from coserve.link import (
    Admitted,
    CancelJob,
    CancelRequest,
    DropAdapter,
    EngineStopped,
    FromEngine,
    Generate,
    Link,
    PauseJob,
    RequestFailed,
    ResumeJob,
    Shutdown,
    SnapshotDone,
    StartJob,
    ToEngine,
    Tokens,
)
from coserve.queues.costs import ATTAINMENT
from coserve.queues.inference import InferenceQueue, Queued
from coserve.queues.policy import Costs, Policy, Serve, Train, Wait
from coserve.state.failpoints import failpoint
from coserve.stream_link import ALIVE
from coserve.types import MicroStep

log = logging.getLogger(__name__)

PREPARATION = 0.5
"""Seconds: longer than a piece of `Generates.prepare`."""


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
        adapters: StoresAdapters,
        policy: Policy,
        link: Link[FromEngine, ToEngine],
        *,
        max_running: int,
        max_queue: int,
        fair: bool,
        max_active_jobs: int,
        step_tokens: int,
        clock: Callable[[], float],
        attainment: float = ATTAINMENT,
        pace: Callable[[], Awaitable[None]] = _yield_to_loop,
        job_threads: Executor | None = None,
        garbage: GarbageCollection | None = None,
        memory: DeviceMemory | None = None,
        mark_training: Mark | None = None,
        between_slices: Between = nullcontext,
        mark_step: Mark | None = None,
        memory_poll: float = STATS_INTERVAL,
    ) -> None:
        """`attainment`: share of answers that are to be in time. `garbage` is collected while no request runs; None: by the
        interpreter. `memory`: the GPU's, where jobs are admitted by it. `mark_training`: slices are only launched, and run beside generation,
        or `between_slices`; None: a slice has ended when the trainer returns. `mark_step`: the end of a step is an event, too; None: the engine
        waits for it. `memory_poll`: seconds between two looks at `memory` while a job waits for it."""
        self._generator, self._adapters = generator, adapters
        self._policy, self._link, self._clock, self._pace = policy, link, clock, pace
        self._memory, self._memory_poll, self._garbage = memory, memory_poll, garbage or GarbageCollection.none()
        self._queue = InferenceQueue(max_queue, fair=fair)
        self._running, self._stalls = RunningRequests(step_tokens), Stalls(clock)
        self._changed = asyncio.Event()
        self._idle = Idle(self._changed, self._garbage, self._stalls)
        self._inbox = Inbox(link, self._handle, self._changed, self._stalls, clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        threads = ThreadPoolExecutor(2 * max_active_jobs, "jobs") if job_threads is None else job_threads
        self._jobs = JobRunner(
            trainer,
            link.send,
            max_active=max_active_jobs,
            threads=threads,
            changed=self._change_from_a_thread,
            memory=memory,
        )
        self._flight = SlicesInFlight(mark_training, clock, self._change_from_a_thread, between_slices, mark_step)
        adapters.notify(self._changed.set)
        self._stopping = False
        self._views = Views(
            self._queue, self._running, self._jobs, max_running=max_running, step_tokens=step_tokens,
            room=lambda: generator.room, attainment=attainment, beside=mark_training is not None,
        )  # fmt: skip
        self._reception = Reception(
            self._queue, self._running, self._views, send=link.send_all, cancel=generator.cancel
        )
        parts = generator, adapters, self._jobs, self._views, self._stalls
        self._reports = Reports(link, clock, parts, (self._queue, self._running), memory)
        self._measured: float | None = None
        """When the last step or slice ended: what follows is part of the next one's time. None: the engine waited since."""
        self._step = LaunchedStep()
        """The last one."""

    async def run(self) -> None:
        """Tick until `Shutdown` comes or the API process is gone. Raises what only a new process mends: `EngineFault`, and
        any error outside of the work of one request or one job."""
        self._loop = asyncio.get_running_loop()
        inbox = asyncio.create_task(self._inbox.run())
        inbox.add_done_callback(lambda _: self._changed.set())
        try:
            while not (self._stopping or inbox.done()):
                self._changed.clear()  # what came until now, the policy sees now
                with self._stalls.during("gc"):
                    self._garbage.while_busy()
                with self._stalls.during("jobs"):
                    self._jobs.activate()
                with self._stalls.during("adapters"):
                    while (request := self._adapters.next_arrived()) is not None:
                        self._admit(request)
                    for request, error in self._adapters.failed():
                        self._fail(request.message, error)
                for ended in self._flight.take_ended():
                    self._slice_ended(ended)
                await self._tick(self._clock())
                if inbox.done():
                    inbox.result()  # a fault in a message's handling must not leave the engine deaf
        finally:
            inbox.cancel()
            self._adapters.close()
            self._jobs.close()
        failpoint("shutdown")
        self._jobs.checkpoint()
        self._link.send(EngineStopped())

    def _change_from_a_thread(self) -> None:
        assert self._loop is not None, "jobs start while the engine runs"
        with suppress(RuntimeError):  # the loop has ended, and the engine with it
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _tick(self, now: float) -> None:
        self._stalls.step_can_begin(has_requests=bool(self._queue) or bool(self._running))
        self._inbox.step_can_begin()
        self._reception.refuse_late(now)
        flight, reading, generator = self._flight.view(), self._adapters.waiting, self._generator
        blocked, launched = generator.blocked, generator.in_flight
        if launched and self._step.ended:
            await self._collect()
            return
        collected = max(now, self._step.expected) if launched else None
        view = self._views.view(now, reading=reading, blocked=blocked, in_flight=flight, collected=collected)
        decision = self._policy.decide(view, now)
        # Where slices are only launched, their launches before a step are no part of its time.
        if self._measured is None or not (launched or self._flight.takes_turns):
            self._measured = now
        match decision:
            case Serve():
                await self._serve(decision, view.costs)
            case Train() if launched and self._flight.takes_turns:
                # Its tokens need not wait for the slice. When they are there, the policy decides again.
                await self._collect()
            case Wait() if launched and self._step.done is None:
                await self._collect()
            case Train():
                await self._train(decision)
            case Wait(until) if self._idle_until(until, now) and self._prepare():
                self._measured = None
                await self._pace()
            case Wait(until):
                self._measured = self._measured if launched else None
                self._reports.send(now, force=not flight.slices)
                if self._running or self._queue or self._adapters.waiting or len(self._jobs):
                    poll = self._memory_poll if self._jobs.wait_for_memory else ALIVE
                    until = min(until or math.inf, now + poll)
                await self._idle.sleep(None if until is None else until - now)

    def _idle_until(self, until: float | None, now: float) -> bool:
        """Nobody waits for an adapter to be read, and no timer fires soon."""
        return not (self._adapters.waiting or self._running) and (until is None or until - now > PREPARATION)

    def _prepare(self) -> bool:
        with self._stalls.during("prepare"):
            return self._generator.prepare()

    # ---- the two kinds of work

    async def _serve(self, decision: Serve, costs: Costs) -> None:
        began, admit = self._clock(), decision.admit
        if admit and not self._running:
            self._views.turns.dispatched()
        with self._stalls.during("admit"):
            for request in (popped := self._queue.pop(admit)):
                if self._adapters.ready(request):
                    self._admit(request)
            self._reception.admitted(popped, began)
        if not self._running or self._generator.blocked:  # all were refused, or wait for their adapters
            await self._pace()
            self._measured = None
            return
        collected = self._step if self._generator.in_flight else None
        with (
            self._stalls.during(kind := self._running.step_kind()),
            self._flight.step(began, costs.of(decision), between=decision.between, kind=kind) as self._step,
        ):
            results = self._generator.step()
        self._report_started(began)
        failpoint("generate.mid_stream")
        self._running.computed(self._generator.launched_prompts())
        await self._accept(results, began, collected or self._step)

    async def _collect(self) -> None:
        """Wait for the step in flight."""
        began = self._clock()
        with self._stalls.during("decode"):
            results = self._generator.collect()
        await self._accept(results, began, self._step)

    async def _accept(self, results: list[Tokens | RequestFailed], began: float, step: LaunchedStep) -> None:
        """What the generator has collected. The time since the last work was measured is that of its steps: those that overlap
        the host's work begin when the one before them ends."""
        await self._pace()
        now, shape = self._clock(), self._generator.computed()
        seconds = 0.0 if shape is None and self._generator.in_flight else now - began  # a launch counts with its step
        if shape is not None and (since := self._measured) is not None:
            seconds = now - self._flight.began(step, since)
            self._views.step_took(shape, seconds, overlapped=self._flight.overlapped(step, since))
            self._measured = now
        self._reports.serve_seconds += seconds
        self._link.send_all(self._running.accept(results, now))
        self._reports.send(now)

    def _admit(self, entry: Queued) -> None:
        request = entry.message
        try:
            self._generator.add(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's alone
            self._fail(request, error)
        else:
            adapter = request.adapter
            size = 0 if adapter is None else self._adapters.size(adapter)
            self._running.add(
                request.id, request.slo, deadline=entry.deadline, prompt=len(request.prompt), end=entry.end,
                tokens=entry.decodes + 1, adapter=adapter, adapter_bytes=size, now=self._clock(),
            )  # fmt: skip

    def _fail(self, request: Generate, error: Exception) -> None:
        """Report `error` as the request's end; re-raise an `EngineFault`."""
        if isinstance(error, EngineFault):
            raise error
        if not isinstance(error, CoserveError):
            log.error("request %s: internal error", request.id, exc_info=error)
        code, message = failure_text(error)
        self._link.send(RequestFailed(id=request.id, code=code, message=message))

    def _report_started(self, at: float) -> None:
        for id in self._running.start(self._generator.started()):
            self._link.send(Admitted(id=id, at=at))

    async def _train(self, decision: Train) -> None:
        if not (self._queue or self._running):
            self._prepare()  # else a job would keep graphs from being captured
            self._measured = self._clock()
        assert self._measured is not None, "it decided to train"
        began, job = (self._measured if self._flight.takes_turns else self._clock()), decision.job
        kind, tokens = self._jobs.next_micro_step(job), self._jobs.micro_batch_tokens(job)
        with self._stalls.during(f"train_{kind}"):
            begins = kind is MicroStep.BEGIN
            shared_tokens = self._views.slices.tokens_within(decision.max_micro_step) if begins else None
            suspended = self._jobs.advance(job, decision.micro_steps, shared_tokens)
        micro_steps = self._jobs.micro_steps_done
        tokens = self._jobs.slice_tokens if suspended else tokens  # the job itself may have failed
        expected = micro_steps * self._views.slices.predict(job, kind, tokens).expected
        self._flight.launched(decision, kind, micro_steps, tokens, began, expected)
        self._views.turns.trained(job, suspended=suspended)
        await self._pace()
        now = self._clock()
        if self._flight.takes_turns:
            self._slice_ended(EndedSlice(decision, kind, micro_steps, tokens, now - began, now))
            self._measured = now
        self._reports.send(now)

    def _slice_ended(self, ended: EndedSlice) -> None:
        self._views.slices.ran(
            ended.decision, ended.kind, ended.micro_steps, ended.tokens, ended.seconds, ended.at, ended.beside,
            ended.beside_kind,
        )  # fmt: skip
        self._reports.train_seconds += ended.seconds

    # ---- messages

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Generate():
                self._reception.enqueue(message, self._clock(), reading=self._adapters.waiting)
            case CancelRequest(id=id):
                if not (self._reception.cancel(id) or self._adapters.cancel(id)) and self._running.remove(id):
                    self._generator.cancel(id)
            case StartJob(spec=spec, paused=paused):
                self._jobs.place(spec, paused=paused)
            case PauseJob(id=id):
                self._jobs.pause(id)
            case ResumeJob(id=id):
                self._jobs.resume(id)
            case CancelJob(id=id):
                self._jobs.cancel(id)
            case DropAdapter(ref=ref):
                self._adapters.drop(ref)
            case SnapshotDone(id=id, ref=ref):
                self._adapters.drop(ref)
                self._jobs.snapshot_done(id, ref)
            case Shutdown():
                self._stopping = True
