"""The engine's tick: collect, propose, decide, commit or train, send results.

The engine knows neither HTTP nor text nor the registry. Requests and jobs arrive as messages over a `Link`; tokens and
job events leave the same way. All state changes happen on the event loop between two ticks, so the batch never changes
during a generation step or a fine-tuning slice.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from coserve.core.garbage import GarbageCollection
from coserve.core.link.engine import ALIVE, DropAdapter, EngineStopped, PrefetchAdapter, SetLogLevel, Shutdown
from coserve.core.link.generation import Admitted, CancelRequest, Generate
from coserve.core.link.jobs import CallSession, CancelJob, OpenSession, PauseJob, ResumeJob, SnapshotDone, StartJob
from coserve.core.link.link import FromEngine, Link, ToEngine
from coserve.core.training.micro_step import MicroStep
from coserve.engine.gauges import Reports
from coserve.engine.inbox import Idle, Inbox
from coserve.engine.job_runner import JobPlaces, JobRunner
from coserve.engine.ports import Generates, StoresAdapters, Trains
from coserve.engine.reception import Reception
from coserve.engine.spatial.slices_in_flight import TURNS, LaunchedStep, Marks, SlicesInFlight
from coserve.engine.stalls import Stalls
from coserve.engine.views import Views
from coserve.generate.plan import Plan, Ran
from coserve.queues.costs import ATTAINMENT
from coserve.queues.policy import Costs, Policy, Serve, Train, Wait
from coserve.queues.request import State
from coserve.queues.shapes import StepKind
from coserve.queues.slices import EndedSlice
from coserve.state.failpoints import failpoint

log = logging.getLogger(__name__)

PREPARATION = 0.5
"""Seconds. `Generates.prepare`, a call of which takes less, runs only if no timer ends within this time."""


async def _yield_to_loop() -> None:
    """Let the link deliver what has arrived: a frame takes a read, a wake-up and a decode."""
    for _ in range(3):
        await asyncio.sleep(0)


class Engine:
    """The engine of one base, on one GPU (or one rank group) and one event loop.

    `clock` returns seconds; `pace` runs after each step (a simulation lets the step's virtual time pass in it).
    """

    def __init__(
        self,
        generator: Generates,
        trainer: Trains,
        adapters: StoresAdapters,
        policy: Policy,
        link: Link[FromEngine, ToEngine],
        *,
        clock: Callable[[], float],
        jobs: JobPlaces,
        marks: Marks = TURNS,
        attainment: float = ATTAINMENT,
        pace: Callable[[], Awaitable[None]] = _yield_to_loop,
        garbage: GarbageCollection | None = None,
    ) -> None:
        """`marks`: how slices and steps signal their ends; `attainment`: fraction of answers that must be in time.
        `garbage` is collected while no request runs; None: the interpreter collects it."""
        self._generator, self._scheduler, self._adapters = generator, generator.scheduler, adapters
        self._policy, self._link, self._clock, self._pace = policy, link, clock, pace
        self._memory_poll, self._garbage = jobs.memory_poll, garbage or GarbageCollection.none()
        self._stalls, self._changed = Stalls(clock), asyncio.Event()
        self._idle = Idle(self._changed, self._garbage, self._stalls)
        self._inbox = Inbox(link, self._handle, self._changed, self._stalls, clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs = JobRunner(trainer, link.send, jobs, changed=self.wake)
        self._flight = SlicesInFlight(marks, clock, self.wake)
        adapters.notify(self._changed.set)
        self._stopping = False
        self._views = Views(self._jobs, attainment=attainment, overlaps=marks.training is not None)
        self._reception = Reception(self._scheduler, self._views, link.send_all)
        parts = generator, adapters, self._jobs, self._views, self._stalls
        self._reports = Reports(link, clock, parts, jobs.memory)
        self._measured: float | None = None
        """When the last step or slice ended: the time from then on counts for the next one. None: the engine has waited
        since."""
        self._step = LaunchedStep()
        """The last launched step."""

    async def run(self) -> None:
        """Tick until `Shutdown` comes or the API process is gone. Raises what requires a new process: `EngineFault`,
        and any error outside of a single request's or job's work."""
        self._loop = asyncio.get_running_loop()
        inbox = asyncio.create_task(self._inbox.run())
        inbox.add_done_callback(lambda _: self._changed.set())
        try:
            while not (self._stopping or inbox.done()):
                self._changed.clear()  # the policy sees everything up to here
                with self._stalls.during("gc"):
                    self._garbage.while_busy()
                with self._stalls.during("jobs"):
                    self._jobs.activate()
                with self._stalls.during("adapters"):
                    self._scheduler.take_loaded()
                    self._link.send_all(self._generator.take_failed())
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

    def wake(self) -> None:
        """Wake the engine for another tick, as something has changed; on any thread."""
        if self._loop is None:
            return  # the first tick will look
        with suppress(RuntimeError):  # the loop has ended, and the engine with it
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _tick(self, now: float) -> None:
        scheduler, launched = self._scheduler, self._generator.in_flight
        self._stalls.step_can_begin(has_requests=bool(scheduler) or bool(scheduler.queue))
        self._inbox.step_can_begin()
        self._reception.refuse_late(now)
        if launched and self._step.ended:
            await self._collect()
            return
        plan = scheduler.propose()
        collected = max(now, self._step.expected) if launched else None
        view = self._views.view(plan, now, in_flight=self._flight.view(), collected=collected)
        decision = self._policy.decide(view, now)
        # With overlap, launches of slices before a step are no part of its time.
        if self._measured is None or not (launched or self._flight.takes_turns):
            self._measured = now
        match decision:
            case Serve():
                await self._serve(decision, plan, view.costs)
            case Train() if launched and self._flight.takes_turns:
                # The launched step's tokens need not wait for the slice. Once they are out, the policy decides again.
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
                self._reports.send(now, force=not view.in_flight.slices)
                if scheduler.requests or len(self._jobs):
                    poll = self._memory_poll if self._jobs.wait_for_memory else ALIVE
                    until = min(until or math.inf, now + poll)
                await self._idle.sleep(None if until is None else until - now)

    def _idle_until(self, until: float | None, now: float) -> bool:
        """Whether no request is in the batch or waits for its adapter, and no timer fires soon."""
        return not (self._scheduler.loading or self._scheduler) and (until is None or until - now > PREPARATION)

    def _prepare(self) -> bool:
        with self._stalls.during("prepare"):
            return self._generator.prepare()

    # ---- the two kinds of work

    async def _serve(self, decision: Serve, plan: Plan, costs: Costs) -> None:
        began, queued = self._clock(), len(self._scheduler.queue)
        if decision.admit and not self._scheduler:
            self._views.alternation.dispatched()
        with self._stalls.during("admit"):
            scheduled = self._scheduler.commit(plan, decision.admit, now=began)
            self._reception.admitted(queued - len(self._scheduler.queue), began)
        if not (scheduled or self._generator.in_flight):  # all were refused, or wait for their adapters
            self._link.send_all(self._generator.take_failed())
            await self._pace()
            self._measured = None
            return
        kind: StepKind = "prefill" if any(item.tokens > 1 for item in scheduled) else "decode"
        collected = self._step if self._generator.in_flight else None
        with (
            self._stalls.during(kind),
            self._flight.step(began, costs.of(decision), between=decision.between, kind=kind) as self._step,
        ):
            ran = self._generator.run(scheduled)
        self._link.send_all([Admitted(id=id, at=began, cached=cached) for id, cached in ran.started.items()])
        failpoint("generate.mid_stream")
        await self._accept(ran, began, collected or self._step)

    async def _collect(self) -> None:
        """Wait for the step in flight, and send its tokens."""
        began = self._clock()
        with self._stalls.during("decode"):
            ran = self._generator.collect()
        await self._accept(ran, began, self._step)

    async def _accept(self, ran: Ran, began: float, step: LaunchedStep) -> None:
        """Account for and send what the generator collected. The time since the last measurement belongs to its steps:
        steps that overlap the host's work begin when their predecessor ends."""
        await self._pace()
        now, shape = self._clock(), ran.computed
        seconds = 0.0 if shape is None and self._generator.in_flight else now - began  # a launch counts with its step
        if shape is not None and (since := self._measured) is not None:
            seconds = now - self._flight.began(step, since)
            self._views.step_took(shape, seconds, overlapped=self._flight.overlapped(step, since))
            self._measured = now
        self._reports.serve_seconds += seconds
        self._scheduler.tokens_came(ran.messages, now)
        self._link.send_all(ran.messages)
        self._reports.send(now)

    async def _train(self, decision: Train) -> None:
        if not (self._scheduler or self._scheduler.queue):
            self._prepare()  # otherwise a job would prevent graph captures
            self._measured = self._clock()
        assert self._measured is not None, "it decided to train"
        began, job = (self._measured if self._flight.takes_turns else self._clock()), decision.job
        kind, tokens = self._jobs.next_micro_step(job), self._jobs.micro_batch_tokens(job)
        with self._stalls.during(f"train_{kind}"):
            begins = kind is MicroStep.BEGIN
            shared_tokens = self._views.slices.tokens_within(decision.max_micro_step) if begins else None
            most = decision.micro_steps
            if most is not None and not self._views.slices.knows(kind):
                most = 1  # other kinds are poor predictors, and requests would wait for all of them
            suspended = self._jobs.advance(job, most, shared_tokens)
        micro_steps = self._jobs.trainer.micro_steps_done
        tokens = self._jobs.slice_tokens if suspended else tokens  # the job itself may have failed
        expected = micro_steps * self._views.slices.predict(job, kind, tokens).expected
        self._flight.launched(decision, kind, micro_steps, tokens, began, expected)
        self._views.alternation.trained(job, suspended=suspended)
        await self._pace()
        now = self._clock()
        if self._flight.takes_turns:
            self._slice_ended(EndedSlice(decision, kind, micro_steps, tokens, now - began, now))
            self._measured = now
        self._reports.send(now)

    def _slice_ended(self, ended: EndedSlice) -> None:
        self._views.slices.ran(ended)
        self._reports.train_seconds += ended.seconds

    # ---- messages

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Generate():
                self._reception.enqueue(message, self._clock())
            case CancelRequest(id=id):
                request = self._scheduler.requests.get(id)
                if request is not None and request.state is State.QUEUED:
                    self._reception.cancel(id)
                else:
                    self._generator.cancel(id)
            case StartJob(spec=spec, paused=paused):
                self._jobs.place(spec, paused=paused)
            case PauseJob(id=id):
                self._jobs.pause(id)
            case ResumeJob(id=id):
                self._jobs.resume(id)
            case CancelJob(id=id):
                self._jobs.cancel(id)
            case OpenSession(spec=spec):
                self._jobs.open(spec)
            case CallSession():
                self._jobs.call(message)
            case DropAdapter(ref=ref):
                self._adapters.drop(ref)
            case PrefetchAdapter(ref=ref, digests=digests, pinned=None):
                self._adapters.prefetch(ref, digests)
            case SetLogLevel(level=level):
                logging.getLogger().setLevel(level.upper())
            case PrefetchAdapter(ref=ref, digests=digests, pinned=bool() as pinned):
                self._adapters.pin(ref, digests, pinned=pinned)
            case SnapshotDone(id=id, ref=ref):
                self._adapters.drop(ref)
                self._jobs.snapshot_done(id, ref)
            case Shutdown():
                self._stopping = True
