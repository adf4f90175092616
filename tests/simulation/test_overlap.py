"""`overlap` on a device that computes a step and training at the same time, each slower than alone: the real tick in
virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from coserve.core.link.generation import Tokens
from coserve.core.link.jobs import StartJob
from coserve.core.link.stats import EngineStats
from coserve.core.training.micro_step import MicroStep
from coserve.core.types import Slo
from coserve.engine.spatial.slices_in_flight import Marks
from coserve.queues.costs import ATTAINMENT, TAKEN_BACK
from coserve.queues.policies.overlap import Overlap
from coserve.queues.shapes import StepShape
from tests.support.examples import sample
from tests.support.fake_gpu import job_always
from tests.support.fake_ports import FREE, Meter
from tests.support.local_engine import Api, running_engine
from tests.support.records import make_request
from tests.support.scenario import job_spec
from tests.support.shared_gpu import SharedGpu, SharingGenerator, SharingTrainer
from tests.support.virtual_clock import run_virtual

LEAD, LEARNING, TOKENS, STREAMS = 1.0, 3, 100, 3
"""Seconds, and answers, before the streams that count."""
STEP, PROMPT, MICRO_STEP = 6e-3, 10e-3, 5e-3


@dataclass(frozen=True)
class Seen:
    late: float
    """Share of tokens that came after their promise: a target apart from the first one on."""
    first: float
    """Seconds of the slowest first token."""
    training: float
    """Share of the time, alone, while requests ran."""
    beside: float
    """Share of the steps of decodes beside training, as the engine reports it."""


async def _live(gpu: SharedGpu, policy: Overlap, tpot: float) -> Seen:
    loop, rng = asyncio.get_running_loop(), random.Random(0)

    def step_seconds(shape: StepShape) -> float:
        return (PROMPT if shape.prefill else STEP) * rng.uniform(0.97, 1.03)

    generator = SharingGenerator(step_seconds, 1e-3, 64, rng, max_running=16)
    generator.gpu = gpu
    spec = job_spec("j")
    trainer = SharingTrainer(Meter(), FREE, job_always(spec), rng, loop.time, gpu=gpu)
    trainer.seconds = lambda kind, _: 0.0 if kind is MicroStep.RESULT else MICRO_STEP * rng.uniform(0.97, 1.03)
    marks = Marks(gpu.mark, gpu.between, gpu.mark_step)
    async with running_engine(generator, trainer, policy, marks=marks) as api:
        api.send(StartJob(spec=spec))
        return await _seen(api, gpu, tpot)


async def _seen(api: Api, gpu: SharedGpu, tpot: float) -> Seen:
    loop = asyncio.get_running_loop()
    sent, came, steps = dict[str, float](), dict[str, list[float]](), dict[bool, int]()

    def ask(id: str, tokens: int) -> None:
        sent[id] = loop.time()
        api.send(make_request(id, tokens, prompt=8, slo=Slo(ttft=1.0, tpot=tpot)))

    async def send() -> None:
        for number in range(STREAMS):
            ask(f"r{number}", TOKENS)
            await asyncio.sleep(0.123)

    async def answers(count: int) -> None:
        while count:
            message = await api.receive()
            if isinstance(message, Tokens):
                came.setdefault(message.id, []).append(loop.time())
                count -= message.finished is not None
            elif isinstance(message, EngineStats):
                steps.update({each.overlapped: each.count for each in message.steps if each.kind == "decode"})

    await asyncio.sleep(LEAD)
    for number in range(LEARNING):
        ask(f"first{number}", 20)
        await answers(1)
    came.clear()
    begin, sending = loop.time(), asyncio.create_task(send())
    await answers(STREAMS)
    end = loop.time()
    trained = gpu.trained_at(end) - gpu.trained_at(begin)
    await sending
    late = sum(at > own[0] + k * tpot + 1e-9 for own in came.values() for k, at in enumerate(own))
    firsts = [own[0] - sent[id] for id, own in came.items()]
    beside = steps.get(True, 0) / max(1, sum(steps.values()))
    return Seen(late / (STREAMS * TOKENS), max(firsts), trained / (end - begin), beside)


def live(gpu: SharedGpu, tpot: float, *, overlapped: bool = True) -> Seen:
    return run_virtual(_live(gpu, Overlap(1.0, overlapped=overlapped), tpot))


@pytest.mark.parametrize("step_speed", sample([0.5, 0.3], 0.5))
def test_a_step_beside_training_costs_less_than_one_in_turn(step_speed: float) -> None:
    """Training has at least what it would have in turns without a pause, and no token is late but the first ones,
    before times are known."""
    seen = live(SharedGpu(step_speed, 0.9), 0.05)
    assert seen.late < 0.02 and seen.first < 0.15
    assert seen.training > 1 - STEP / 0.05
    assert seen.beside > 0.7


@pytest.mark.parametrize("tpot", sample([0.02, 0.05], 0.05))
def test_where_a_step_beside_training_is_too_slow_they_take_turns(tpot: float) -> None:
    """It would take 60 ms. The deadlines are kept but for those that the next tokens take back, and training has most
    of the rest."""
    seen = live(SharedGpu(0.1, 0.9), tpot)
    assert seen.late < TAKEN_BACK * (1 - ATTAINMENT) and seen.first < 0.2
    assert seen.training > 0.8 * (1 - STEP / tpot)


def test_where_training_loses_more_beside_a_step_than_in_turn_they_take_turns() -> None:
    """Beside each other both are slower than one after the other."""
    slow = live(SharedGpu(0.4, 0.2), 0.05)
    assert slow.late < TAKEN_BACK * (1 - ATTAINMENT)
    assert slow.training > 0.9 * (1 - STEP / 0.05)


@pytest.mark.parametrize("tpot", sample([0.02, 0.05], 0.05))
def test_turns_without_a_pause_may_be_chosen(tpot: float) -> None:
    gpu = SharedGpu(0.1, 0.1)
    seen = live(gpu, tpot, overlapped=False)
    assert gpu.both == 0.0, "seconds in which both were computed"
    assert seen.beside == 0.0
    assert seen.late < 0.02 and seen.first < 0.15
    assert seen.training > 0.85 * (1 - STEP / tpot)


def test_targets_that_leave_no_time_stop_training_but_for_its_patience() -> None:
    seen = live(SharedGpu(0.5, 0.9), 0.005)
    assert 0.0 < seen.training < 0.15, "while first tokens wait, and by patience"


def test_a_device_that_idles_for_nobody() -> None:
    """Without requests the next slice is launched before the one in flight ends."""
    gpu = SharedGpu(0.5, 0.9)
    live(gpu, 0.05)
    assert gpu.trained_at(LEAD) > 0.97 * LEAD
