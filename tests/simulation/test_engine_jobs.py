"""Jobs start on threads, and an error of a job ends that job alone. On the real event loop, with real threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from coserve.core.errors import EngineFault, JobOutOfMemory
from coserve.core.link import jobs
from coserve.core.link.engine import EngineStopped, Shutdown
from coserve.core.link.generation import RequestFailed
from coserve.core.link.link import FromEngine, ToEngine
from tests.support.fake_ports import JobPlan
from tests.support.job_scene import PLANS, Scene, Trouble, ask, ended, said, scene, start


async def test_requests_are_served_while_a_job_starts() -> None:
    async with scene() as at:
        at.api.send(start("one"))
        await at.loading()
        at.api.send(ask("text", 50))
        before = await at.until(ended("text"))
        assert not any(map(said(jobs.JobStarted, "one"), before))
        at.trainer.go.set()
        await at.until(said(jobs.JobStarted, "one"), said(jobs.JobSucceeded, "one"))
        assert threading.get_ident() not in at.trainer.threads, "neither a start nor a preparation runs on the tick"


async def test_other_jobs_train_while_one_starts() -> None:
    async with scene() as at:
        at.trainer.go.set()
        at.api.send(start("two"))
        await at.until(said(jobs.JobStarted, "two"))
        at.trainer.go.clear()
        at.trainer.loading.clear()
        at.api.send(start("one"))
        await at.loading()
        await at.until(said(jobs.JobSucceeded, "two"))


async def test_a_cancelled_start_stops_at_once() -> None:
    async with scene(active=1) as at:
        at.api.send(start("one"))
        await at.loading()
        at.api.send(jobs.CancelJob(id="one"))
        await at.until(said(jobs.JobCancelled, "one"))
        assert await asyncio.to_thread(at.trainer.stopped.wait, 60)
        at.trainer.go.set()
        at.api.send(start("two"))
        assert not any(map(said(jobs.JobStarted, "one"), await at.until(said(jobs.JobSucceeded, "two"))))


async def test_a_paused_start_begins_again() -> None:
    async with scene(active=1) as at:
        at.api.send(start("one"))
        await at.loading()
        at.api.send(jobs.PauseJob(id="one"))
        await at.until(said(jobs.JobPaused, "one"))
        assert await asyncio.to_thread(at.trainer.stopped.wait, 60)
        at.trainer.go.set()
        at.api.send(jobs.ResumeJob(id="one"))
        await at.until(said(jobs.JobSucceeded, "one"))


async def test_the_engine_stops_while_a_job_starts() -> None:
    async with scene() as at:
        at.api.send(start("one"))
        await at.loading()
        at.api.send(Shutdown())
        seen = await at.until(lambda message: isinstance(message, EngineStopped))
        await at.running
        assert await asyncio.to_thread(at.trainer.stopped.wait, 60)
        assert not any(isinstance(message, jobs.JobStarted | jobs.JobFailed) for message in seen)


@pytest.mark.parametrize(
    "operation", ["load", "start", "preparation", "prepare", "advance", "checkpoint", "write", "publish"]
)
async def test_whatever_a_jobs_work_raises_ends_that_job_alone(
    operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(operation) as at:
        at.trainer.go.set()
        for message in (start("one"), start("two"), ask("text", 30)):
            at.api.send(message)
        seen = await at.until(said(jobs.JobFailed, "one"), said(jobs.JobSucceeded, "two"), ended("text"))
        (failed,) = [message for message in seen if isinstance(message, jobs.JobFailed)]
        assert failed.code == "internal_error"
        assert "ZeroDivisionError" in failed.message and "/some" not in failed.message
        (record,) = [record for record in caplog.records if record.exc_info]
        assert "one" in record.getMessage() and "/some/private/path" in str(record.exc_info[1])
        assert at.trainer.active == 0, "the job's memory is free"
        at.trainer.operation = ""
        at.api.send(start("one"))
        await at.until(said(jobs.JobSucceeded, "one"))


@dataclass
class Releasing(Trouble):
    """Memory is there once some was released."""

    releases: int = 0

    def release_memory(self) -> bool:
        self.operation, self.releases = "", self.releases + 1
        return self.releases == 1


async def test_a_start_that_finds_no_memory_is_tried_again_where_some_can_be_released() -> None:
    async with scene("load", JobOutOfMemory, kind=Releasing) as at:
        at.trainer.go.set()
        at.api.send(start("one"))
        await at.until(said(jobs.JobSucceeded, "one"))
        at.trainer.operation = "load"
        at.api.send(start("two"))
        await at.until(said(jobs.JobSucceeded, "two"))
        assert isinstance(at.trainer, Releasing) and at.trainer.releases == 1


@dataclass
class HeldByAPass(Trouble):
    """The pass of job `two` ends once memory was asked for, if `ends`; memory is there then, if `frees`."""

    ends: bool = True
    frees: bool = True
    began: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)

    def release_memory(self) -> bool:
        self.asked.set()
        return False

    def advance(
        self, job: str, micro_steps: int | None, others: Sequence[str] = (), shared_tokens: int | None = None
    ) -> list[FromEngine]:
        ends = self.ends and self.asked.is_set()
        messages = super().advance(job, None if ends else 1, others, shared_tokens)
        self.began.set()
        if ends and self.frees:
            self.operation = ""
        return messages


@asynccontextmanager
async def start_beside_a_pass(*, frees: bool = True, ends: bool = True) -> AsyncIterator[Scene]:
    """Job `one` starts while a pass of job `two` is suspended, and finds no memory."""
    async with scene("load", JobOutOfMemory, kind=HeldByAPass) as at:
        assert isinstance(at.trainer, HeldByAPass)
        at.trainer.frees, at.trainer.ends = frees, ends
        at.trainer.plans = at.trainer.plans | {"two": JobPlan(2, 1 << 20, 2, None)}
        at.trainer.go.set()
        at.api.send(start("two"))
        assert await asyncio.to_thread(at.trainer.began.wait, 60)
        at.api.send(start("one"))
        assert await asyncio.to_thread(at.trainer.asked.wait, 60)
        yield at


@pytest.mark.parametrize(("frees", "end"), [(True, jobs.JobSucceeded), (False, jobs.JobFailed)])
@pytest.mark.slow
async def test_a_start_that_finds_no_memory_is_tried_again_after_the_pass_that_holds_some(
    frees: bool, end: type[FromEngine]
) -> None:
    async with start_beside_a_pass(frees=frees) as at:
        await at.until(said(end, "one"), said(jobs.JobSucceeded, "two"))
        assert at.trainer.active == 0


@pytest.mark.parametrize(
    ("order", "end"), [(jobs.CancelJob(id="one"), jobs.JobCancelled), (jobs.PauseJob(id="one"), jobs.JobPaused)]
)
async def test_a_start_that_waits_for_a_pass_can_be_ended(order: ToEngine, end: type[FromEngine]) -> None:
    async with start_beside_a_pass(ends=False) as at:
        at.api.send(order)
        seen = await at.until(said(end, "one"))
        assert not any(map(said(jobs.JobFailed, "one"), seen))
        at.api.send(jobs.CancelJob(id="two"))
        await at.until(said(jobs.JobCancelled, "two"))


async def test_a_start_that_finds_no_memory_fails_where_none_can_be_released() -> None:
    async with scene("load", JobOutOfMemory) as at:
        at.trainer.go.set()
        at.api.send(start("one"))
        seen = await at.until(said(jobs.JobFailed, "one"))
        assert [message.code for message in seen if isinstance(message, jobs.JobFailed)] == [JobOutOfMemory.code]


@pytest.mark.parametrize("operation", ["preparation", "checkpoint"])
async def test_a_job_that_fails_between_two_slices_leaves_its_place_to_the_next_at_once(operation: str) -> None:
    """Nothing else wakes the engine: there are no requests."""
    async with scene(operation, active=1) as at:
        at.trainer.go.set()
        at.api.send(start("one"))
        at.api.send(start("two"))
        await at.until(said(jobs.JobFailed, "one"), said(jobs.JobSucceeded, "two"))


@pytest.mark.parametrize(
    ("operation", "order", "answer"),
    [
        ("checkpoint", jobs.PauseJob(id="one"), jobs.JobPaused),
        ("drop", jobs.PauseJob(id="one"), jobs.JobPaused),
        ("finish_update", jobs.PauseJob(id="one"), jobs.JobFailed),
        ("finish_update", jobs.CancelJob(id="one"), jobs.JobCancelled),
        ("drop", jobs.CancelJob(id="one"), jobs.JobCancelled),
    ],
)
async def test_what_a_checkpoint_or_a_drop_raises_costs_no_more_than_that(
    operation: str, order: jobs.PauseJob | jobs.CancelJob, answer: type[FromEngine]
) -> None:
    async with scene(operation) as at:
        at.trainer.plans = {
            job: JobPlan(steps=10_000, micro_steps=4, checkpoint_every=20_000, fails_at=None) for job in PLANS
        }
        at.trainer.go.set()
        at.api.send(start("one"))
        await at.until(said(jobs.JobStarted, "one"))
        at.api.send(order)
        await at.until(said(answer, "one"))
        assert at.trainer.active == 0
        at.api.send(ask("text"))
        await at.until(ended("text"))


async def test_shutdown_survives_a_checkpoint_that_raises() -> None:
    async with scene("checkpoint") as at:
        at.trainer.go.set()
        at.api.send(start("one"))
        await at.until(said(jobs.JobStarted, "one"))
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
    thrice: threading.Event = field(default_factory=threading.Event)

    def publication(self, job: str) -> Callable[[], Callable[[], jobs.JobSucceeded | jobs.JobWaiting]]:
        publish = super().publication(job)
        return publish if job == "two" else lambda: self._publish(publish())

    def _publish(
        self, publish: Callable[[], jobs.JobSucceeded | jobs.JobWaiting]
    ) -> Callable[[], jobs.JobSucceeded | jobs.JobWaiting]:
        self.attempts += 1
        if self.attempts == 3:
            self.thrice.set()
        if not self.headroom:
            return lambda: jobs.JobWaiting(id="one", message="waiting for space: the disk is full")
        return publish


async def test_a_job_that_waits_for_space_says_so_once_and_lets_others_train() -> None:
    async with scene(kind=Full) as at:
        assert isinstance(at.trainer, Full)
        at.trainer.go.set()
        at.api.send(start("one"))
        await at.until(said(jobs.JobWaiting, "one"))
        at.api.send(start("two"))
        at.api.send(ask("text"))
        await at.until(said(jobs.JobSucceeded, "two"), ended("text"))
        assert await asyncio.to_thread(at.trainer.thrice.wait, 240)
        at.trainer.headroom = True
        seen = await at.until(said(jobs.JobSucceeded, "one"))
        assert len([message for message in seen if isinstance(message, jobs.JobWaiting)]) == 1


@pytest.mark.parametrize(
    ("order", "answer"),
    [
        (jobs.PauseJob(id="one"), jobs.JobPaused),
        (jobs.CancelJob(id="one"), jobs.JobCancelled),
        (Shutdown(), EngineStopped),
    ],
)
async def test_a_job_that_waits_for_space_obeys(order: ToEngine, answer: type[FromEngine]) -> None:
    async with scene(kind=Full) as at:
        at.trainer.go.set()
        at.api.send(start("one"))
        await at.until(said(jobs.JobWaiting, "one"))
        at.api.send(order)
        await at.until(lambda message: isinstance(message, answer))
        assert isinstance(order, Shutdown) or at.trainer.active == 0
