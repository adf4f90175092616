"""Seconds that the engine reports for generation and training, while both take turns on one device."""

from __future__ import annotations

import asyncio
import random

import pytest

from coserve.engine.engine import Engine
from coserve.link import EngineStats, EngineStopped, Generate, Shutdown, StartJob, local_pair
from coserve.queues.policies.slack import Slack
from coserve.types import SamplingParams, Slo
from tests.support.fake_gpu import FREE, BlockingTrainer, OverlappedGenerator, job_always
from tests.support.fake_ports import Inline, Meter, NoAdapters
from tests.support.scenario import job_spec
from tests.support.virtual_clock import run_virtual

STEP, LAUNCH, MICRO_STEP = 0.010, 0.004, 0.004
SECONDS = 10.0


def test_a_launched_step_counts_once() -> None:
    """Its launch is a part of the time until its tokens are collected."""
    found, elapsed = run_virtual(live())
    assert found.train_seconds > 1.0 and found.serve_seconds > 1.0
    assert found.serve_seconds + found.train_seconds <= elapsed + 1e-6
    counts = {(each.kind, each.beside): each for each in found.steps}
    assert set(counts) <= {("prefill", False), ("decode", False)}, "they take turns with training"
    decodes = counts["decode", False]
    assert decodes.seconds / decodes.count == pytest.approx(STEP + LAUNCH, rel=0.1), "the device waits for each launch"
    assert sum(each.seconds for each in counts.values()) <= found.serve_seconds + 1e-6


async def live() -> tuple[EngineStats, float]:
    """The last stats of one stream beside a job, and the seconds until then."""
    loop, rng, spec = asyncio.get_running_loop(), random.Random(0), job_spec("j")
    generator = OverlappedGenerator(lambda _: STEP, LAUNCH, 64, rng)
    trainer = BlockingTrainer(Meter(), FREE, job_always(spec), rng, loop.time)
    trainer.seconds = lambda kind, tokens: MICRO_STEP
    api, ours = local_pair()
    engine = Engine(
        generator, trainer, NoAdapters(), Slack(1.0), ours, max_running=8, max_queue=8, fair=True, max_active_jobs=1,
        step_tokens=64, clock=loop.time, job_threads=Inline(),
    )  # fmt: skip
    run = asyncio.create_task(engine.run())
    slo = Slo(ttft=1.0, tpot=0.05)
    api.send(StartJob(spec=spec))
    api.send(Generate(id="r", prompt=(1, 2), sampling=SamplingParams(max_tokens=1 << 20), adapter=None, slo=slo))
    loop.call_later(SECONDS, api.send, Shutdown())
    last: EngineStats | None = None
    at = 0.0
    while not isinstance(message := await api.receive(), EngineStopped):
        if isinstance(message, EngineStats):
            last, at = message, loop.time()
    await run
    assert last is not None, "it reports about once a second"
    return last, at
