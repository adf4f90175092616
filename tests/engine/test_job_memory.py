"""Jobs are admitted by the memory that there is, beside real threads and the engine's own loop."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec
import pytest

from coserve.admission.memory import Hold, HostAdmission, MemoryAdmission, Start
from coserve.admission.recompute_plan import JobMemory, RecomputePlan, job_memory
from coserve.core.cancellation import Cancellation
from coserve.core.errors import JobOutOfMemory
from coserve.core.gpu_memory import GIB, MemoryModel, MemoryUse
from coserve.core.link.generation import Tokens
from coserve.core.link.jobs import (
    CancelJob,
    JobCancelled,
    JobFailed,
    JobNote,
    JobPaused,
    JobStarted,
    JobSucceeded,
    JobWaiting,
    PauseJob,
    ResumeJob,
    StartJob,
)
from coserve.core.link.link import FromEngine
from coserve.core.training.jobs import JobSpec
from coserve.core.types import LoraSettings
from coserve.engine.job_memory import DeviceMemory, Fixed
from coserve.engine.job_runner import JobPlaces, JobRunner
from coserve.memory.allocator import Reading
from coserve.queues.policies.paper import Ets
from tests.support.fake_ports import FREE, FakeGenerator, FakeTrainer, Inline, JobPlan, Meter
from tests.support.gpu_memory import BASE, COSTS
from tests.support.job_scene import Trouble, ask, ended, said, scene, start
from tests.support.local_engine import running_engine
from tests.support.records import make_spec
from tests.support.virtual_clock import run_virtual

LIMIT = 4096
HELD, STEP = 20 * GIB, GIB
FIXED = Fixed(held=HELD, pages=12 * GIB, page=1 << 20, step=STEP, graphs=2 * GIB, context=GIB, planned=40 * GIB)


@dataclass
class Graphs:
    size: int = GIB
    complete: bool = True


@dataclass
class Device:
    """A GPU of 80 GiB, of which torch has allocated what it holds."""

    reading: Reading = field(
        default_factory=lambda: Reading(total=80 * GIB, free=50 * GIB, reserved=28 * GIB, allocated=HELD, peak=HELD)
    )

    def read(self) -> Reading:
        return self.reading


def spec(id: str, rank: int = 16) -> JobSpec:
    own = make_spec(id, adapter=id)
    return msgspec.structs.replace(own, lora=LoraSettings(r=rank), tokens=1 << 20, target_tokens=1 << 19, longest=64)


def needs(rank: int = 16) -> JobMemory:
    return job_memory(spec("one", rank), BASE, MemoryModel(costs=COSTS, training=GIB), LIMIT)


def memory(training: int, device: Device | None = None) -> DeviceMemory:
    admission = MemoryAdmission(MemoryModel(costs=COSTS, training=training), BASE, LIMIT)
    return DeviceMemory(admission, FIXED, (device or Device()).read, Graphs(), clock=count(0.0).__next__)


async def test_a_job_in_line_waits_for_memory_and_starts_when_another_ends() -> None:
    one = needs()
    own = memory(one.state.total + one.options[0].activations)
    async with scene(memory=own, holds="prepare") as s:
        s.trainer.go.set()
        for id in ("one", "two"):
            s.api.send(StartJob(spec=spec(id)))
        seen = await s.until(said(JobWaiting, "two"), said(JobStarted, "one"))
        assert not any(map(said(JobStarted, "two"), seen)), "the other place is free, the memory is not"
        assert s.trainer.limits["one"] == one.options[0].recompute_plan
        s.trainer.gate.set()
        seen = await s.until(said(JobSucceeded, "one"), said(JobSucceeded, "two"))
        assert sum(map(said(JobWaiting, "two"), seen)) == 1
        assert not any(isinstance(message, JobNote) for message in seen)


@dataclass
class Slow(Trouble):
    """The start of job `one` cannot be interrupted where it `holds`."""

    loads: int = 0

    def load(self, spec: JobSpec, cancellation: Cancellation) -> Callable[[], JobStarted]:
        self.loads += 1
        self.on_a_thread("load", spec.id)
        return super().load(spec, cancellation)


async def test_the_memory_of_a_cancelled_start_is_free_once_its_thread_has_ended() -> None:
    one = needs()
    own = memory(one.state.total + one.options[0].activations)
    async with scene(kind=Slow, memory=own, holds="load", active=3) as s:
        s.trainer.go.set()
        s.api.send(StartJob(spec=spec("one")))
        await s.held()
        s.api.send(CancelJob(id="one"))
        s.api.send(StartJob(spec=spec("two")))
        seen = await s.until(said(JobCancelled, "one"), said(JobWaiting, "two"))
        assert not any(map(said(JobStarted, "two"), seen)), "what has begun to start may hold memory"
        s.trainer.gate.set()
        await s.until(said(JobSucceeded, "two"))


class Tensors:
    """What a start has allocated."""


class Greedy(Trouble):
    """The start of a job fails with something in its hands."""

    allocated: weakref.ref[Tensors]

    def load(self, spec: JobSpec, cancellation: Cancellation) -> Callable[[], JobStarted]:
        tensors = Tensors()
        self.allocated = weakref.ref(tensors)
        raise JobOutOfMemory("no memory")


async def test_a_start_that_has_failed_holds_nothing() -> None:
    """Nor does it where garbage is collected later, while the engine is idle."""
    async with scene(kind=Greedy) as s:
        gc.disable()
        try:
            s.api.send(StartJob(spec=spec("one")))
            await s.until(said(JobFailed, "one"))
            assert isinstance(s.trainer, Greedy)
            async with asyncio.timeout(60):
                while s.trainer.allocated() is not None:  # noqa: ASYNC110 - its thread may still be leaving the call
                    await asyncio.sleep(0.001)
        finally:
            gc.enable()


async def test_a_job_that_was_paused_while_it_started_starts_again_once_that_start_has_ended() -> None:
    one = needs()
    own = memory(4 * (one.state.total + one.options[0].activations))
    async with scene(kind=Slow, memory=own, holds="load", active=3) as s:
        s.trainer.go.set()
        s.api.send(StartJob(spec=spec("one")))
        await s.held()
        s.api.send(PauseJob(id="one"))
        await s.until(said(JobPaused, "one"))
        s.api.send(ResumeJob(id="one"))
        s.api.send(ask("text", 30))
        await s.until(ended("text"))
        assert isinstance(s.trainer, Slow) and s.trainer.loads == 1
        s.trainer.gate.set()
        await s.until(said(JobSucceeded, "one"))


@pytest.mark.parametrize("leaves", ["one", "two"])
@pytest.mark.parametrize("pauses", [False, True])
def test_the_memory_of_a_job_that_has_left_a_shared_pass_is_free_once_that_has_ended(leaves: str, pauses: bool) -> None:
    need, said_so = needs(), list[FromEngine]()
    plans = {id: JobPlan(2, 4, 9, None, rows=2) for id in ("one", "two", "three")}
    trainer = FakeTrainer(Meter(), FREE, plans, random.Random(0), lambda: 0.0, batch_rows=8)
    places = JobPlaces(3, Inline(), memory(2 * need.state.total + need.options[0].activations))
    jobs = JobRunner(trainer, said_so.append, places, changed=lambda: None)
    for id in ("one", "two"):
        jobs.place(spec(id), paused=False)
    jobs.activate()
    assert jobs.advance("one", 1) and trainer.passes[0].jobs == ["one", "two"]
    (stays,) = {"one", "two"} - {leaves}
    if pauses:
        jobs.pause(leaves)
        jobs.activate()
        jobs.resume(leaves)
    else:
        jobs.cancel(leaves)
        jobs.place(spec("three"), paused=False)
    jobs.activate()
    assert any(map(said(JobPaused if pauses else JobCancelled, leaves), said_so))
    comes, starts = (leaves, 2) if pauses else ("three", 1)
    assert sum(map(said(JobStarted, comes), said_so)) == starts - 1, "the others still compute what it has begun"
    assert not jobs.advance(stays, None)
    jobs.activate()
    assert sum(map(said(JobStarted, comes), said_so)) == starts


def test_jobs_wait_for_host_memory_where_the_gpu_s_is_not_planned() -> None:
    said_so, sizes = list[FromEngine](), {"one": 2, "large": 4, "two": 2}
    plans = {id: JobPlan(2, 4, 9, None, rows=2) for id in sizes}
    trainer = FakeTrainer(Meter(), FREE, plans, random.Random(0), lambda: 0.0, batch_rows=8)
    places = JobPlaces(3, Inline(), HostAdmission(lambda job: sizes[job.id], limit=3))
    jobs = JobRunner(trainer, said_so.append, places, changed=lambda: None)
    for id in sizes:
        jobs.place(spec(id), paused=False)
    jobs.activate()
    assert any(map(said(JobStarted, "one"), said_so)) and any(map(said(JobWaiting, "two"), said_so))
    (failed,) = (message for message in said_so if isinstance(message, JobFailed))
    assert (failed.id, failed.code) == ("large", "job_too_large") and "got 4: 1 are missing" in failed.message
    jobs.cancel("one")
    jobs.activate()
    assert any(map(said(JobStarted, "two"), said_so))


async def test_a_job_that_never_fits_ends_alone_with_the_numbers() -> None:
    async with scene(memory=memory(needs(256).least - 1)) as s:
        s.trainer.go.set()
        s.api.send(StartJob(spec=spec("two", 256)))
        s.api.send(StartJob(spec=spec("one")))
        seen = await s.until(said(JobFailed, "two"), said(JobSucceeded, "one"))
        (failed,) = (message for message in seen if isinstance(message, JobFailed))
        assert failed.code == "job_too_large"
        assert str(needs(256).least) in failed.message


class Faulty(MemoryAdmission):
    def admit(self, spec: JobSpec) -> Start | Hold:
        found = super().admit(spec)
        if spec.id == "one":
            raise ZeroDivisionError("in /some/private/path")
        return found


async def test_an_error_of_ours_in_the_prediction_ends_that_job_alone() -> None:
    two = needs()
    admission = Faulty(MemoryModel(costs=COSTS, training=two.state.total + two.options[0].activations), BASE, LIMIT)
    async with scene(memory=DeviceMemory(admission, FIXED, Device().read, Graphs())) as s:
        s.trainer.go.set()
        for id in ("one", "two"):
            s.api.send(StartJob(spec=spec(id)))
        seen = await s.until(said(JobFailed, "one"), said(JobSucceeded, "two"))
        (failed,) = (message for message in seen if isinstance(message, JobFailed))
        assert (failed.code, "private" in failed.message) == ("internal_error", False)


async def test_a_job_that_fits_only_with_recomputation_gets_it_and_is_told() -> None:
    one = needs()
    async with scene(memory=memory(one.least)) as s:
        s.trainer.go.set()
        s.api.send(StartJob(spec=spec("one")))
        seen = await s.until(said(JobSucceeded, "one"))
        (note,) = (message for message in seen if isinstance(message, JobNote))
        assert note.kept
        assert "recomputes 4 of 4 layers" in note.message
        assert s.trainer.limits["one"] == RecomputePlan(64, recomputed=4)


async def test_a_job_is_planned_for_the_layers_that_it_runs() -> None:
    lean = msgspec.structs.replace(COSTS, layer=3000.0)
    model = MemoryModel(costs=COSTS, training=GIB, compiled=lean)
    (first, *_) = job_memory(spec("one"), BASE, model, LIMIT).options
    async with scene(memory=memory(needs().state.total + first.activations)) as s:
        s.trainer.layer_costs = lean
        s.trainer.go.set()
        s.api.send(StartJob(spec=spec("one")))
        seen = await s.until(said(JobSucceeded, "one"))
        assert not any(isinstance(message, JobNote) for message in seen)
        assert s.trainer.limits["one"] == first.recompute_plan and first.recompute_plan.compiled


async def test_memory_that_another_process_gives_back_starts_the_job_that_waits() -> None:
    """Nothing else wakes the engine meanwhile."""
    one, device = needs(), Device()
    own = memory(one.state.total + one.options[0].activations, device)
    device.reading = replace(device.reading, free=0, reserved=22 * GIB)
    async with scene(memory=own, memory_poll=0.05) as s:
        s.trainer.go.set()
        s.api.send(StartJob(spec=spec("one")))
        await s.until(said(JobWaiting, "one"))
        device.reading = replace(device.reading, free=56 * GIB)
        await s.until(said(JobSucceeded, "one"))


def test_while_a_job_waits_for_memory_the_policys_timers_fire_in_time() -> None:
    """The device is read each second, and a batch is complete after 0.2 s."""

    async def live() -> tuple[float, float]:
        one, device, loop, rng = needs(), Device(), asyncio.get_running_loop(), random.Random(0)
        own = memory(one.state.total + one.options[0].activations, device)
        device.reading = replace(device.reading, free=0, reserved=22 * GIB)
        plans = {"one": JobPlan(steps=2, micro_steps=2, checkpoint_every=9, fails_at=None)}
        generator, trainer = (
            FakeGenerator(Meter(), FREE, 64, rng, 0.0),
            FakeTrainer(Meter(), FREE, plans, rng, loop.time),
        )
        sent, came = 0.0, dict[type[FromEngine], float]()
        async with running_engine(generator, trainer, Ets(4, 0.2), jobs=JobPlaces(1, Inline(), own)) as api:
            api.send(StartJob(spec=spec("one")))
            while JobSucceeded not in came:
                message = await api.receive()
                came.setdefault(type(message), loop.time())
                if isinstance(message, JobWaiting):
                    sent = loop.time()
                    api.send(ask("text"))
                elif isinstance(message, Tokens) and message.finished is not None:
                    device.reading = replace(device.reading, free=56 * GIB)
        return came[Tokens] - sent, came[JobSucceeded] - sent

    first, trained = run_virtual(live())
    assert first == pytest.approx(0.2, abs=0.01)
    assert 1.0 < trained < 20.0, "once it was there in ten readings"


async def test_without_a_plan_every_job_starts() -> None:
    async with scene() as s:
        s.trainer.go.set()
        s.api.send(start("one"))
        await s.until(said(JobSucceeded, "one"))
        assert s.trainer.limits == {}


def whole(use: MemoryUse) -> int:
    parts = (use.weights, use.pages, use.graphs, use.jobs, use.temporary, use.cached, use.context, use.others, use.free)
    return sum(parts)


def test_the_uses_are_all_of_the_device() -> None:
    one, device = needs(), Device()
    device.reading = replace(device.reading, free=51 * GIB)
    own = memory(40 * GIB, device)
    assert whole(own.use(3)) == 80 * GIB
    own.admission.admit(spec("one"))
    device.reading = replace(device.reading, free=50 * GIB, allocated=HELD + one.state.total + GIB, peak=HELD + 3 * GIB)
    use = own.use(3)
    assert whole(use) == use.total == 80 * GIB
    assert (use.weights, use.pages, use.adapters, use.graphs) == (8 * GIB, 12 * GIB, 3 << 20, GIB)
    assert (use.jobs, use.temporary, use.context, use.others) == (one.state.total, GIB, GIB, GIB)
    assert use.needed == one.state.total + one.options[0].activations
    assert [(job.id, job.state) for job in use.each] == [("one", one.state.total)]


def test_what_lies_outside_of_the_allocator_at_the_start_is_not_of_other_processes() -> None:
    """NCCL and the CUDA libraries may take more than the bound for a usual process."""
    device = Device()
    own = memory(40 * GIB, device)

    def outside(free: int) -> tuple[int, int]:
        device.reading = replace(device.reading, free=free)
        use = own.use(0)
        assert whole(use) == 80 * GIB
        return use.context, use.others

    assert outside(50 * GIB) == (2 * GIB, 0)
    assert outside(45 * GIB) == (2 * GIB, 5 * GIB)
    assert outside(51 * GIB + 5) == (GIB - 5, 0), "processes that compiled kernels have ended"
    assert outside(50 * GIB) == (GIB, GIB), "what is taken after that is another's"


def test_graphs_are_bounded_until_they_are_measured() -> None:
    sizes, told = Graphs(size=0, complete=False), list[int]()
    device = Device(Reading(total=80 * GIB, free=10 * GIB, reserved=28 * GIB, allocated=HELD, peak=HELD))
    admission = MemoryAdmission(MemoryModel(costs=COSTS, training=16 * GIB), BASE, LIMIT)
    own = DeviceMemory(admission, FIXED, device.read, sizes, told.append, count(0.0).__next__)
    before = admission.limit
    assert before == (10 + 28 - 20 - 1 - 2) * GIB
    sizes.size, sizes.complete = GIB, True
    for _ in range(10):
        own.refresh()
    assert admission.limit == before + GIB
    assert told == [GIB], "once"
    sizes.complete = False  # an adapter of another rank has come
    sizes.size = 3 * GIB // 2
    own.refresh()
    assert told == [GIB]
    sizes.complete = True
    own.refresh()
    assert told == [GIB, 3 * GIB // 2]


def test_what_others_give_back_counts_after_seconds_however_often_the_device_is_read() -> None:
    now, device = 0.0, Device()
    device.reading = replace(device.reading, free=0)
    admission = MemoryAdmission(MemoryModel(costs=COSTS, training=16 * GIB), BASE, LIMIT)
    own = DeviceMemory(admission, FIXED, device.read, Graphs(), clock=lambda: now)
    before = admission.limit
    device.reading = replace(device.reading, free=5 * GIB)
    for _ in range(100):
        own.refresh()
        now += 0.01
    assert admission.limit == before
    for _ in range(10):
        now += 1.0
        own.refresh()
    assert admission.limit == before + 5 * GIB


def test_what_others_take_on_another_ranks_gpu_counts_beyond_what_they_took_here() -> None:
    now, elsewhere = 0.0, 0
    device = Device(Reading(total=80 * GIB, free=10 * GIB, reserved=28 * GIB, allocated=HELD, peak=HELD))
    admission = MemoryAdmission(MemoryModel(costs=COSTS, training=16 * GIB), BASE, LIMIT)
    own = DeviceMemory(admission, FIXED, device.read, Graphs(), clock=lambda: now, taken_elsewhere=lambda: elsewhere)
    before = admission.limit
    elsewhere = 3 * GIB
    own.refresh()
    assert admission.limit == before - 3 * GIB
    device.reading = replace(device.reading, free=device.reading.free - GIB)
    own.refresh()
    assert admission.limit == before - 3 * GIB, "of which one was taken here, too"
