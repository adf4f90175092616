"""The upgrade to compiled steps while the engine serves: adopted between two steps, reported, and not waited for at a shutdown."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable

import pytest

from coserve.engine.engine import Engine
from coserve.engine.job_line import WAITS_FOR_KERNELS
from coserve.link import (
    EngineNotes,
    EngineStats,
    EngineStopped,
    EngineWarming,
    FromEngine,
    Generate,
    JobStarted,
    JobSucceeded,
    LocalLink,
    Shutdown,
    StartJob,
    ToEngine,
    Tokens,
    local_pair,
)
from coserve.queues.policies.slack import Slack
from coserve.types import JobSpec, SamplingParams, Slo
from tests.support.fake_ports import FakeGenerator, FakeTrainer, JobPlan, Meter, NoAdapters, Prices
from tests.support.scenario import job_spec

FREE = Prices(step=0.0, token=0.0, micro_step=0.0, spikes=0.0)


class Preparing(FakeGenerator):
    """Has some work to do ahead, once it was upgraded."""

    pieces = 0
    prepared: list[int]
    """How many requests ran at each piece."""
    ready: asyncio.Event

    def prepare(self) -> bool:
        if self.pieces:
            self.pieces -= 1
            self.prepared.append(self.running)
            return True
        if self.prepared:
            self.ready.set()
        return False


class Part:
    """Layers of jobs that are loaded at the last of some tries."""

    def __init__(self, name: str, tries: int, told: list[str]) -> None:
        self.name, self.tries, self.told = name, tries, told

    @property
    def done(self) -> bool:
        return self.tries == 0

    async def ready(self) -> None:
        self.told.append(f"wait for {self.name}")

    def load(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.tries -= 1
        self.told.append(f"load {self.name}")


class Work:
    """Compiles until `go` is set; may fail."""

    def __init__(self, generator: Preparing, *, fails: bool = False) -> None:
        self.generator, self.fails = generator, fails
        self.go, self.thread = threading.Event(), threading.get_ident()
        self.trains, self.changed = True, list[Callable[[], None]]()
        self.told = list[str]()
        self.part_loads: tuple[Part, ...] = ()

    def compile(self) -> None:
        self.thread = threading.get_ident()
        self.go.wait()
        if self.fails:
            raise ZeroDivisionError

    compiled = False

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.told)

    async def ready(self) -> None:
        pass

    def load_layers(self) -> None:
        pass

    def preload_eager(self) -> None:
        assert threading.get_ident() == self.thread

    def progress(self) -> EngineWarming:
        return EngineWarming(done=len(self.generator.prepared), total=3, seconds_left=None, notes=())

    def may_train(self, spec: JobSpec) -> bool:
        return self.trains or spec.id == "other"

    def notify(self, changed: Callable[[], None]) -> None:
        self.changed.append(changed)

    def adopt(self) -> tuple[str, ...]:
        assert threading.get_ident() != self.thread
        self.generator.pieces = 3
        return ("fast",)


def begin(fails: bool = False) -> tuple[Engine, Work, Preparing, LocalLink[ToEngine, FromEngine]]:
    meter, rng, loop = Meter(), random.Random(0), asyncio.get_running_loop()
    generator = Preparing(meter, FREE, 64, rng, 0.0)
    generator.prepared, generator.ready = [], asyncio.Event()
    work, (api, engine_end) = Work(generator, fails=fails), local_pair()
    trainer = FakeTrainer(meter, FREE, {"job": JobPlan(1, 1, 1, None), "other": JobPlan(1, 1, 1, None)}, rng, loop.time)
    engine = Engine(
        generator, trainer, NoAdapters(), Slack(1.0), engine_end, max_running=4, max_queue=4, fair=True,
        max_active_jobs=1, step_tokens=64, clock=loop.time, upgrade=work,
    )  # fmt: skip
    return engine, work, generator, api


async def until(api: LocalLink[ToEngine, FromEngine], kind: type[FromEngine]) -> list[FromEngine]:
    heard = [await api.receive()]
    while not isinstance(heard[-1], kind):
        heard.append(await api.receive())
    return heard


def request(id: str, tokens: int) -> Generate:
    return Generate(
        id=id, prompt=(1, 2), sampling=SamplingParams(max_tokens=tokens), adapter=None, slo=Slo(ttft=1.0, tpot=1.0)
    )


async def test_requests_are_served_meanwhile_and_pieces_are_done_when_none_runs() -> None:
    engine, work, generator, api = begin()
    running = asyncio.create_task(engine.run())
    api.send(request("early", 2))
    heard = await until(api, Tokens)
    assert not any(isinstance(message, EngineNotes) for message in heard)
    api.send(request("long", 500))
    work.go.set()
    heard = await until(api, EngineNotes)
    assert heard[-1] == EngineNotes(notes=("fast",))
    await asyncio.wait_for(generator.ready.wait(), 240)
    assert generator.prepared == [0, 0, 0]
    api.send(Shutdown())
    await until(api, EngineStopped)
    await running


async def test_an_idle_engine_does_pieces_as_soon_as_steps_are_adopted() -> None:
    engine, work, generator, api = begin()
    running = asyncio.create_task(engine.run())
    await until(api, EngineStats)
    work.go.set()
    await asyncio.wait_for(generator.ready.wait(), 240)
    assert generator.prepared == [0, 0, 0]
    api.send(Shutdown())
    await until(api, EngineStopped)
    await running


async def test_each_part_of_jobs_is_loaded_until_it_is_done_before_the_next_one() -> None:
    engine, work, _, api = begin()
    work.part_loads = Part("layers", 2, work.told), Part("levels", 1, work.told)
    running = asyncio.create_task(engine.run())
    work.go.set()
    heard = [each for _ in range(4) for each in await until(api, EngineNotes)]
    found = [message.notes for message in heard if isinstance(message, EngineNotes)]
    layers, levels = ("wait for layers", "load layers"), ("wait for levels", "load levels")
    assert found == [("fast",), layers, (*layers, *layers), (*layers, *layers, *levels)]
    api.send(Shutdown())
    await until(api, EngineStopped)
    await running


async def test_a_job_starts_once_its_kernels_are_compiled() -> None:
    engine, work, _, api = begin()
    work.trains = False
    running = asyncio.create_task(engine.run())
    api.send(StartJob(spec=job_spec("job")))
    api.send(StartJob(spec=job_spec("other")))
    heard = await until(api, JobSucceeded)
    assert [message.id for message in heard if isinstance(message, JobStarted)] == ["other"]
    heard = await until(api, EngineStats)
    while WAITS_FOR_KERNELS not in heard[-1].troubles:
        heard += await until(api, EngineStats)
    work.trains = True
    for changed in work.changed:
        changed()
    heard += await until(api, JobSucceeded)
    assert [message.id for message in heard if isinstance(message, JobStarted)] == ["job"]
    api.send(Shutdown())
    heard = await until(api, EngineStopped)
    await running
    assert not any(WAITS_FOR_KERNELS in message.troubles for message in heard if isinstance(message, EngineStats))
    work.go.set()


async def test_a_shutdown_does_not_wait_for_the_thread() -> None:
    engine, work, _, api = begin()
    running = asyncio.create_task(engine.run())
    api.send(Shutdown())
    heard = await until(api, EngineStopped)
    await running
    assert not any(isinstance(message, EngineNotes) for message in heard)
    work.go.set()


async def test_a_fault_in_the_thread_ends_the_engine() -> None:
    engine, work, _, _ = begin(fails=True)
    work.go.set()
    with pytest.raises(ZeroDivisionError):
        await engine.run()
