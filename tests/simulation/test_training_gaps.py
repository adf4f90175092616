"""Training goes on wherever there is slack, whatever a micro-step took once; where there is none, it is said why.

A steady stream of tokens 46 ms apart, which may be 200 ms apart: a third of each gap is needed, the rest is slack.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import pytest

from coserve.core.link.engine import EngineStopped, Shutdown
from coserve.core.link.generation import Tokens
from coserve.core.link.jobs import JobProgress, StartJob
from coserve.core.link.link import FromEngine
from coserve.core.link.stats import EngineStats
from coserve.core.training.micro_step import MicroStep
from coserve.core.types import Slo
from coserve.queues.costs import FIRST_GUESS
from coserve.queues.policies.slack import Slack
from tests.support.examples import sample
from tests.support.fake_ports import FakeGenerator, FakeTrainer, JobPlan, Meter, Prices
from tests.support.local_engine import running_engine
from tests.support.records import make_request
from tests.support.scenario import job_spec
from tests.support.virtual_clock import run_virtual

PRICES = Prices(step=0.046, token=0.0, micro_step=0.01, spikes=0.0)
MICRO_STEPS, PATIENCE, SECONDS = 12, 1.0, 30.0
STREAM = make_request(max_tokens=1 << 20, slo=Slo(ttft=2.0, tpot=0.2))

Cost = Callable[[MicroStep, int], float]
"""Seconds of a micro-step, from its kind and its number."""


class _Trainer(FakeTrainer):
    cost_of: Cost
    micro_steps = 0
    slices: list[tuple[MicroStep, int]]
    """The kind of each, and how many micro-steps it had."""

    def before_slice(self, job: str, kinds: Sequence[MicroStep]) -> None:
        self.slices.append((kinds[0], len(kinds)))

    def cost(self, kind: MicroStep) -> float:
        self.micro_steps += 1
        return self.cost_of(kind, self.micro_steps)


def live(cost: Cost, slices: list[tuple[MicroStep, int]] | None = None) -> list[tuple[float, FromEngine]]:
    """What the engine says in `SECONDS`, and when. `slices`: to be filled, of a job without requests."""

    async def main() -> list[tuple[float, FromEngine]]:
        loop, rng, meter = asyncio.get_running_loop(), random.Random(0), Meter()
        generator = FakeGenerator(meter, PRICES, 64, rng, 0.0, max_running=64)
        trainer = _Trainer(meter, PRICES, {"j0": JobPlan(1 << 20, MICRO_STEPS, 1 << 20, None)}, rng, loop.time)
        trainer.cost_of, trainer.slices = cost, [] if slices is None else slices
        async with running_engine(generator, trainer, Slack(PATIENCE), pace=meter.pace) as api:
            if slices is None:
                api.send(STREAM)
            api.send(StartJob(spec=job_spec("j0")))
            loop.call_later(SECONDS, api.send, Shutdown())
            said: list[tuple[float, FromEngine]] = []
            while not said or not isinstance(said[-1][1], EngineStopped):
                message = await api.receive()
                said.append((loop.time(), message))
            return said

    return run_virtual(main())


def gaps(said: list[tuple[float, FromEngine]]) -> list[float]:
    """Seconds between optimizer steps."""
    return [b - a for a, b in pairwise(at for at, message in said if isinstance(message, JobProgress))]


def last_stats(said: list[tuple[float, FromEngine]]) -> EngineStats:
    return [message for _, message in said if isinstance(message, EngineStats)][-1]


STEP = 1.0
"""More seconds than an optimizer step takes while the stream runs."""


SLOW_ONES = [(1, 5.0), (60, 5.0), (50, 2.0), (61, 5.0), (100, 0.3)]


@pytest.mark.parametrize("case", sample(SLOW_ONES, *SLOW_ONES[:2]), ids=str)
def test_one_slow_micro_step_costs_itself_and_nothing_else(case: tuple[int, float]) -> None:
    at, seconds = case
    said = live(lambda kind, number: seconds if number == at else 0.01)
    assert max(gaps(said), default=0.0) <= seconds + STEP
    assert sorted(gaps(said))[-2] <= STEP
    assert last_stats(said).patience_slices == 0


@cache
def most_without_a_slow_one() -> float:
    return max(gaps(live(lambda kind, number: 0.08)))


FILLING = [(60, 0.78), (59, 0.5), (61, 1.5), (66, 0.78), (71, 1.5)]


@pytest.mark.parametrize("case", sample(FILLING, FILLING[0]), ids=str)
def test_no_gap_where_micro_steps_fill_most_of_the_slack(case: tuple[int, float]) -> None:
    """Micro-steps of 80 ms, slack of 123 ms, one slow micro-step: an average of all micro-steps stayed above the slack
    for seconds (a gap of 6.1 s after one of 0.78 s), for it was corrected by the one micro-step a second that patience
    let through."""
    at, seconds = case
    said = live(lambda kind, number: seconds if number == at else 0.08)
    most = most_without_a_slow_one() + seconds + STREAM.slo.tpot
    assert max(gaps(said)) <= most, "the stream's lost time is made up for"
    assert last_stats(said).patience_slices == 0


def test_a_kind_that_is_too_slow_holds_up_itself_alone() -> None:
    """A micro-batch whose first micro-step takes 1.2 s: that never fits, it waits for its patience once, and the
    micro-steps of other kinds for nothing."""
    said = live(lambda kind, number: 1.2 if kind is MicroStep.BEGIN else 0.01)
    assert max(gaps(said)) <= 1.2 + PATIENCE + STEP
    stats = last_stats(said)
    assert 0 < stats.patience_slices <= len(gaps(said)) + 1
    assert stats.starving is None, "the other micro-steps fit"


def test_the_optimizer_step_has_a_cost_of_its_own() -> None:
    """A slow one that fits into no gap neither stops the micro-steps of other kinds nor is believed to be as fast as
    they are."""
    said = live(lambda kind, number: 0.3 if kind is MicroStep.OPTIMIZER else 0.01)
    assert max(gaps(said)) <= 0.3 + PATIENCE + STEP
    assert 0 < last_stats(said).patience_slices <= len(gaps(said)) + 1


def test_a_kind_that_is_slow_now_and_then_fits_as_it_usually_does() -> None:
    """Optimizer steps of 90 ms, every tenth of 260 ms, which is above the slack: tokens of the next gaps make up for
    it. Each of them waited for its patience, while tokens came far ahead of their time."""
    optimizer_steps = itertools.count()

    def cost(kind: MicroStep, number: int) -> float:
        return 0.01 if kind is not MicroStep.OPTIMIZER else 0.09 if next(optimizer_steps) % 10 else 0.26

    said = live(cost)
    assert max(gaps(said)) <= STEP
    assert last_stats(said).patience_slices == 0
    came = [at for at, message in said if isinstance(message, Tokens)]
    assert 0.17 < (came[-1] - came[0]) / (len(came) - 1) <= STREAM.slo.tpot


def test_the_first_slices_of_a_kind_have_one_micro_step() -> None:
    """Requests that come wait for the whole slice, and other kinds tell little: here backwards take 140 times as long
    as forwards."""
    slices = list[tuple[MicroStep, int]]()
    live(lambda kind, number: 0.7 if kind is MicroStep.BACKWARD else 0.005, slices)
    by_kind = {kind: [count for each, count in slices if each is kind] for kind, _ in slices}
    assert all(counts[:2] == [1, 1] for counts in by_kind.values())
    assert max(by_kind[MicroStep.BACKWARD]) == 1 and max(by_kind[MicroStep.FORWARD]) > 1


def test_training_that_runs_by_patience_alone_says_so() -> None:
    said = live(lambda kind, number: 0.21)
    stats = last_stats(said)
    assert stats.patience_slices > 10
    assert stats.starving is not None
    assert stats.starving.seconds > 10
    assert 0.21 <= stats.starving.micro_step <= 0.21 * FIRST_GUESS + 1e-6
    assert 0 < stats.starving.slack < stats.starving.micro_step


@pytest.mark.parametrize("costs", sample([(0.4, 0.01), (0.15, 0.05)], (0.4, 0.01)), ids=str)
def test_a_lasting_change_is_followed(costs: tuple[float, float]) -> None:
    """Slow for a while, then fast for good: each kind of micro-step needs two samples to believe it."""
    slow, fast = costs
    said = live(lambda kind, number: slow if 100 <= number < 112 else fast)
    assert max(gaps(said)) <= 12 * slow + 12 * PATIENCE + STEP
    late = [at for at, message in said if isinstance(message, JobProgress)][-8:]
    assert max(b - a for a, b in pairwise(late)) <= STEP
