"""Seconds that the engine reports for generation and training, while both take turns on one device or share it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from coserve.core.link.engine import EngineStopped, Shutdown
from coserve.core.link.jobs import StartJob
from coserve.core.link.stats import EngineStats
from coserve.core.training.jobs import JobSpec
from coserve.core.training.micro_step import MicroStep
from coserve.core.types import Slo
from coserve.engine.spatial.slices_in_flight import Marks
from coserve.queues.policy import Decision, Serve, Train, View, Wait
from tests.support.fake_gpu import BlockingTrainer, OverlappedGenerator, job_always
from tests.support.fake_ports import FREE, Meter
from tests.support.local_engine import Api, running_engine
from tests.support.records import make_request
from tests.support.scenario import job_spec
from tests.support.shared_gpu import SharedGpu, SharingGenerator, SharingTrainer
from tests.support.virtual_clock import run_virtual

STEP, LAUNCH, MICRO_STEP = 0.010, 0.004, 0.004
SECONDS = 10.0


def test_a_launched_step_counts_once() -> None:
    """Its launch is a part of the time until its tokens are collected."""
    found, elapsed = run_virtual(live())
    assert found.train_seconds > 1.0 and found.serve_seconds > 1.0
    assert found.serve_seconds + found.train_seconds <= elapsed + 1e-6
    counts = {(each.kind, each.overlapped): each for each in found.steps}
    assert set(counts) <= {("prefill", False), ("decode", False)}, "they take turns with training"
    decodes = counts["decode", False]
    assert decodes.seconds / decodes.count == pytest.approx(STEP + LAUNCH, rel=0.1), "the device waits for each launch"
    assert sum(each.seconds for each in counts.values()) <= found.serve_seconds + 1e-6


async def live() -> tuple[EngineStats, float]:
    """Of one stream beside a job."""
    loop, rng, spec = asyncio.get_running_loop(), random.Random(0), job_spec("j")
    generator = OverlappedGenerator(lambda _: STEP, LAUNCH, 64, rng)
    trainer = BlockingTrainer(Meter(), FREE, job_always(spec), rng, loop.time)
    trainer.seconds = lambda kind, tokens: MICRO_STEP
    async with running_engine(generator, trainer) as api:
        return await last_stats(api, spec)


async def last_stats(api: Api, spec: JobSpec) -> tuple[EngineStats, float]:
    """The last stats of one stream beside a job, and the seconds until then."""
    loop = asyncio.get_running_loop()
    api.send(StartJob(spec=spec))
    api.send(make_request(max_tokens=1 << 20, slo=Slo(ttft=1.0, tpot=0.05)))
    loop.call_later(SECONDS, api.send, Shutdown())
    last: EngineStats | None = None
    at = 0.0
    while not isinstance(message := await api.receive(), EngineStopped):
        if isinstance(message, EngineStats):
            last, at = message, loop.time()
    assert last is not None, "it reports about once a second"
    return last, at


class OneByOne:
    """Launches a slice, and a step at once, which runs beside it or after it (`between`); the next slice once the step
    has ended."""

    def __init__(self, step_in_flight: Callable[[], bool], *, between: bool) -> None:
        self._step_in_flight, self._between = step_in_flight, between

    def decide(self, view: View, now: float) -> Decision:
        if self._step_in_flight():
            return Wait(None)
        if view.in_flight.since_step:
            return Serve(len(view.waiting), between=self._between)
        return Train(view.jobs[0], 1) if view.jobs else Wait(None)


@pytest.mark.parametrize(("between", "seconds"), [(False, LAUNCH + STEP), (True, STEP)])
def test_neither_a_slice_before_a_step_nor_its_launch_is_a_part_of_the_steps_time(
    between: bool, seconds: float
) -> None:
    """A slice is launched in half of the time that the device takes."""
    found = run_virtual(shared(between=between))
    counts = {(each.kind, each.overlapped): each for each in found.steps}
    decodes = counts["decode", not between]
    assert decodes.count > 50
    assert decodes.seconds / decodes.count == pytest.approx(seconds, rel=0.01)


async def shared(*, between: bool) -> EngineStats:
    loop, rng, spec, gpu = asyncio.get_running_loop(), random.Random(0), job_spec("j"), SharedGpu(1.0, 1.0)
    generator = SharingGenerator(lambda _: STEP, LAUNCH, 64, rng)
    generator.gpu = gpu
    trainer = SharingTrainer(Meter(), FREE, job_always(spec), rng, loop.time, gpu=gpu, launch=0.5)
    trainer.seconds = lambda kind, tokens: 0.0 if kind is MicroStep.RESULT else 10 * MICRO_STEP
    policy = OneByOne(lambda: generator.in_flight, between=between)
    marks = Marks(gpu.mark, gpu.between, gpu.mark_step)
    async with running_engine(generator, trainer, policy, marks=marks) as api:
        return (await last_stats(api, spec))[0]
