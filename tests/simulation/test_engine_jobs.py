"""Jobs start on threads beside the tick, and what one raises ends that one alone. On the real loop, with real threads."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from coserve.cancellation import Cancellation, Cancelled
from coserve.engine.engine import Engine
from coserve.errors import EngineFault
from coserve.link import (
    CancelJob,
    EngineStats,
    EngineStopped,
    FromEngine,
    Generate,
    JobCancelled,
    JobCheckpoint,
    JobFailed,
    JobPaused,
    JobStarted,
    JobSucceeded,
    JobWaiting,
    LocalLink,
    PauseJob,
    RequestFailed,
    ResumeJob,
    Shutdown,
    StartJob,
    ToEngine,
    Tokens,
    local_pair,
)
from coserve.queues.policy import Slack
from coserve.types import AdapterRef, JobSpec, SamplingParams, Slo
from tests.support.fake_ports import FakeGenerator, FakeTrainer, JobPlan, Meter, NoAdapters, Prices
from tests.support.records import make_spec

FREE = Prices(step=0.0, token=0.0, micro_step=0.0, spikes=0.0)
PLANS = {job: JobPlan(steps=5, micro_steps=4, checkpoint_every=2, fails_at=None) for job in ("one", "two")}


@dataclass
class Trouble(FakeTrainer):
    """Raises `error` in `operation` of job `one`; its loads wait for `go`."""

    operation: str = ""
    error: type[Exception] = ZeroDivisionError
    go: threading.Event = field(default_factory=threading.Event)
    loading: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)
    threads: set[int] = field(default_factory=set)

    def _trouble(self, operation: str, job: str) -> None:
        if job == "one" and operation == self.operation:
            raise self.error("in /some/private/path")

    def load(self, spec: JobSpec, cancellation: Cancellation) -> Callable[[], JobStarted]:
        self.threads.add(threading.get_ident())
        self.loading.set()
        while not self.go.wait(0.002):
            try:
                cancellation.check()
            except Cancelled:
                self.stopped.set()
                raise
        self._trouble("load", spec.id)
        start = super().load(spec, cancellation)

        def call() -> JobStarted:
            self._trouble("start", spec.id)
            return start()

        return call

    def preparation(self, job: str) -> Callable[[Cancellation], None] | None:
        self._trouble("preparation", job)

        def prepare(cancellation: Cancellation) -> None:
            self.threads.add(threading.get_ident())
            self._trouble("prepare", job)

        return prepare

    def advance(self, job: str, micro_steps: int | None) -> list[FromEngine]:
        if self.ran[job]:
            self._trouble("advance", job)
        return super().advance(job, micro_steps)

    def checkpoint(self, job: str) -> JobCheckpoint | None:
        self._trouble("checkpoint", job)
        return super().checkpoint(job)

    def drop(self, job: str) -> None:
        super().drop(job)
        self._trouble("drop", job)


class Picky(FakeGenerator):
    def add(self, request: Generate) -> None:
        if request.id == "poison":
            raise ZeroDivisionError("in /some/private/path")
        super().add(request)


@dataclass
class Scene:
    trainer: Trouble
    api: LocalLink[ToEngine, FromEngine]
    running: asyncio.Task[None]
    seen: list[FromEngine] = field(default_factory=list)

    async def until(self, *wanted: Callable[[FromEngine], bool]) -> list[FromEngine]:
        """All messages so far, once each of `wanted` was among them."""
        async with asyncio.timeout(240):
            while not all(any(map(one, self.seen)) for one in wanted):
                message = await self.api.receive()
                if not isinstance(message, EngineStats):
                    self.seen.append(message)
        return self.seen

    async def loading(self) -> None:
        await asyncio.to_thread(self.trainer.loading.wait, 60)


@asynccontextmanager
async def scene(
    operation: str = "", error: type[Exception] = ZeroDivisionError, active: int = 2, kind: type[Trouble] = Trouble
) -> AsyncIterator[Scene]:
    meter, rng, loop = Meter(), random.Random(0), asyncio.get_running_loop()
    trainer = kind(meter, FREE, PLANS, rng, loop.time, operation=operation, error=error)
    api, engine_end = local_pair()
    engine = Engine(
        Picky(meter, FREE, 64, rng, 0.0), trainer, NoAdapters(), Slack(4, 1.0), engine_end, max_running=4, max_queue=8,
        fair=True, max_active_jobs=active, step_tokens=64, clock=loop.time,
    )  # fmt: skip
    running = asyncio.create_task(engine.run())
    try:
        yield Scene(trainer, api, running)
    finally:
        trainer.go.set()
        api.send(Shutdown())
        await asyncio.gather(running, return_exceptions=True)


def ask(id: str, tokens: int = 5) -> Generate:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return Generate(id=id, prompt=(1, 2, 3), sampling=sampling, adapter=None, slo=Slo(ttft=60.0, tpot=60.0))


def start(id: str) -> StartJob:
    return StartJob(spec=make_spec(id, adapter=id))


def said(kind: type[FromEngine], id: str) -> Callable[[FromEngine], bool]:
    return lambda message: isinstance(message, kind) and message.id == id


def ended(id: str) -> Callable[[FromEngine], bool]:
    return lambda message: isinstance(message, Tokens) and message.id == id and message.finished is not None


async def test_requests_are_served_while_a_job_starts() -> None:
    async with scene() as at:
        at.api.send(start("one"))
        await at.loading()
        at.api.send(ask("text", 50))
        before = await at.until(ended("text"))
        assert not any(map(said(JobStarted, "one"), before))
        at.trainer.go.set()
        await at.until(said(JobStarted, "one"), said(JobSucceeded, "one"))
        assert threading.get_ident() not in at.trainer.threads, "neither a start nor a preparation runs on the tick"


async def test_other_jobs_train_while_one_starts() -> None:
    async with scene() as at:
        at.trainer.go.set()
        at.api.send(start("two"))
        await at.until(said(JobStarted, "two"))
        at.trainer.go.clear()
        at.trainer.loading.clear()
        at.api.send(start("one"))
        await at.loading()
        await at.until(said(JobSucceeded, "two"))


async def test_a_cancelled_start_stops_at_once() -> None:
    async with scene(active=1) as at:
        at.api.send(start("one"))
        await at.loading()
        at.api.send(CancelJob(id="one"))
        await at.until(said(JobCancelled, "one"))
        assert await asyncio.to_thread(at.trainer.stopped.wait, 60)
        at.trainer.go.set()
        at.api.send(start("two"))
        assert not any(map(said(JobStarted, "one"), await at.until(said(JobSucceeded, "two"))))


async def test_a_paused_start_begins_again() -> None:
    async with scene(active=1) as at:
        at.api.send(start("one"))
        await at.loading()
        at.api.send(PauseJob(id="one"))
        await at.until(said(JobPaused, "one"))
        assert await asyncio.to_thread(at.trainer.stopped.wait, 60)
        at.trainer.go.set()
        at.api.send(ResumeJob(id="one"))
        await at.until(said(JobSucceeded, "one"))


async def test_the_engine_stops_while_a_job_starts() -> None:
    async with scene() as at:
        at.api.send(start("one"))
        await at.loading()
        at.api.send(Shutdown())
        seen = await at.until(lambda message: isinstance(message, EngineStopped))
        await at.running
        assert await asyncio.to_thread(at.trainer.stopped.wait, 60)
        assert not any(isinstance(message, JobStarted | JobFailed) for message in seen)


@pytest.mark.parametrize("operation", ["load", "start", "preparation", "prepare", "advance"])
async def test_whatever_a_jobs_work_raises_ends_that_job_alone(
    operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(operation) as at:
        at.trainer.go.set()
        for message in (start("one"), start("two"), ask("text", 30)):
            at.api.send(message)
        seen = await at.until(said(JobFailed, "one"), said(JobSucceeded, "two"), ended("text"))
        (failed,) = [message for message in seen if isinstance(message, JobFailed)]
        assert failed.code == "internal_error"
        assert "ZeroDivisionError" in failed.message and "/some" not in failed.message
        (record,) = [record for record in caplog.records if record.exc_info]
        assert "one" in record.getMessage() and "/some/private/path" in str(record.exc_info[1])
        assert at.trainer.active == 0, "the job's memory is free"
        at.trainer.operation = ""
        at.api.send(start("one"))
        await at.until(said(JobSucceeded, "one"))


@pytest.mark.parametrize(
    ("operation", "order", "answer"),
    [
        ("checkpoint", PauseJob(id="one"), JobPaused),
        ("drop", PauseJob(id="one"), JobPaused),
        ("drop", CancelJob(id="one"), JobCancelled),
    ],
)
async def test_what_a_checkpoint_or_a_drop_raises_costs_no_more_than_that(
    operation: str, order: PauseJob | CancelJob, answer: type[FromEngine]
) -> None:
    async with scene(operation) as at:
        at.trainer.plans = {
            job: JobPlan(steps=10_000, micro_steps=4, checkpoint_every=20_000, fails_at=None) for job in PLANS
        }
        at.trainer.go.set()
        at.api.send(start("one"))
        await at.until(said(JobStarted, "one"))
        at.api.send(order)
        await at.until(said(answer, "one"))
        assert at.trainer.active == 0
        at.api.send(ask("text"))
        await at.until(ended("text"))


async def test_shutdown_survives_a_checkpoint_that_raises() -> None:
    async with scene("checkpoint") as at:
        at.trainer.go.set()
        at.api.send(start("one"))
        await at.until(said(JobStarted, "one"))
        at.api.send(Shutdown())
        await at.until(lambda message: isinstance(message, EngineStopped))


async def test_an_engine_fault_ends_the_engine() -> None:
    async with scene("advance", EngineFault) as at:
        at.trainer.go.set()
        at.api.send(start("one"))
        with pytest.raises(EngineFault):
            await asyncio.wait_for(at.running, 240)


async def test_whatever_admitting_a_request_raises_ends_that_request_alone() -> None:
    async with scene() as at:
        for message in (ask("before", 30), ask("poison"), ask("after")):
            at.api.send(message)
        seen = await at.until(said(RequestFailed, "poison"), ended("before"), ended("after"))
        (failed,) = [message for message in seen if isinstance(message, RequestFailed)]
        assert failed.code == "internal_error" and "/some" not in failed.message


@dataclass
class Full(Trouble):
    """The disk has no room for the adapter of job `one` until `headroom`."""

    headroom: bool = False
    attempts: int = 0
    thrice: asyncio.Event = field(default_factory=asyncio.Event)

    def advance(self, job: str, micro_steps: int | None) -> list[FromEngine]:
        if job == "one" and self.ran[job][-1:] == [5]:
            return self._publish()
        messages = super().advance(job, micro_steps)
        if job == "one" and isinstance(messages[-1] if messages else None, JobSucceeded):
            self.published.remove(job)
            return messages[:-1] + self._publish()
        return messages

    def _publish(self) -> list[FromEngine]:
        self.attempts += 1
        if self.attempts == 3:
            self.thrice.set()
        if not self.headroom:
            return [JobWaiting(id="one", message="waiting for space: the disk is full")]
        self.published.append("one")
        return [JobSucceeded(id="one", ref=AdapterRef("one", 1))]


async def test_a_job_that_waits_for_space_says_so_once_and_lets_others_train() -> None:
    async with scene(kind=Full) as at:
        assert isinstance(at.trainer, Full)
        at.trainer.go.set()
        at.api.send(start("one"))
        await at.until(said(JobWaiting, "one"))
        at.api.send(start("two"))
        at.api.send(ask("text"))
        await at.until(said(JobSucceeded, "two"), ended("text"))
        await asyncio.wait_for(at.trainer.thrice.wait(), 240)
        at.trainer.headroom = True
        seen = await at.until(said(JobSucceeded, "one"))
        assert len([message for message in seen if isinstance(message, JobWaiting)]) == 1


@pytest.mark.parametrize(
    ("order", "answer"),
    [(PauseJob(id="one"), JobPaused), (CancelJob(id="one"), JobCancelled), (Shutdown(), EngineStopped)],
)
async def test_a_job_that_waits_for_space_obeys(order: ToEngine, answer: type[FromEngine]) -> None:
    async with scene(kind=Full) as at:
        at.trainer.go.set()
        at.api.send(start("one"))
        await at.until(said(JobWaiting, "one"))
        at.api.send(order)
        await at.until(lambda message: isinstance(message, answer))
        assert isinstance(order, Shutdown) or at.trainer.active == 0
