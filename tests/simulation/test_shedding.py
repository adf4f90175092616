"""Requests that would be late are refused at once, and no others, by the real tick in virtual time."""

from __future__ import annotations

import random

import pytest

from coserve.core.errors import Overloaded
from coserve.core.link.generation import RequestFailed, Tokens
from coserve.core.link.jobs import StartJob
from coserve.core.link.link import ToEngine
from coserve.core.types import AdapterRef, Slo
from coserve.queues.policies.slack import Slack
from tests.support.examples import sample
from tests.support.fake_ports import JobPlan, Prices
from tests.support.records import make_request
from tests.support.scenario import Outcome, Scenario, job_spec, play

TOKENS, STEP, BATCH = 10, 0.02, 4
CAPACITY = BATCH / (TOKENS * STEP)
"""Requests a second."""


def live(
    rate: float, *, ttft: float, tpot: float = 0.5, shed: bool = True, count: int = 200, adapters: int = 0
) -> Outcome:
    """Requests at a steady rate beside a job, each for one of so many adapters that is drawn."""
    rng = random.Random(0)
    slo = Slo(ttft=ttft, tpot=tpot, shed=shed)
    script: list[tuple[float, ToEngine]] = [(0.0, StartJob(spec=job_spec("j")))]
    for number in range(count):
        adapter = AdapterRef(f"a{rng.randrange(adapters)}", 1) if adapters else None
        script.append((number / rate, make_request(f"r{number}", TOKENS, prompt=8, adapter=adapter, slo=slo)))
    return play(
        Scenario(
            policy=Slack(patience=1e9),
            script=tuple(script),
            plans={"j": JobPlan(500, 8, 1 << 20, None)},
            prices=Prices(step=STEP, token=0.0, micro_step=0.01, spikes=0.0),
            max_running=BATCH,
        )
    )


def ends(outcome: Outcome) -> tuple[list[float], list[float]]:
    """Seconds to the first tokens, and to the refusals."""
    firsts, refusals = list[float](), list[float]()
    for id, sent in outcome.sent.items():
        at, message = next(item for item in outcome.of(id) if isinstance(item[1], Tokens | RequestFailed))
        if isinstance(message, RequestFailed):
            assert message.code == Overloaded.code
            assert message.retry_after is not None and 1 <= message.retry_after <= 30
        (refusals if isinstance(message, RequestFailed) else firsts).append(at - sent)
    return firsts, refusals


@pytest.mark.parametrize("ttft", sample([0.4, 1.0], 1.0))
def test_above_capacity_nobody_is_late_and_the_others_are_told_at_once(ttft: float) -> None:
    firsts, refusals = ends(live(2 * CAPACITY, ttft=ttft))
    late = [seconds for seconds in firsts if seconds > ttft]
    assert len(late) <= 0.02 * len(firsts)
    assert len(firsts) >= 0.4 * 200, "the batch is full all the time"
    at_once = [seconds for seconds in refusals if seconds <= 2 * STEP]
    assert len(at_once) >= 0.8 * len(refusals), "but for those before the speed was known, and who just missed a place"


@pytest.mark.parametrize("ttft", sample([1.0, 3.0], 1.0))
@pytest.mark.slow
def test_whom_others_overtake_who_come_later_is_told_before_its_deadline(ttft: float) -> None:
    firsts, refusals = ends(live(1.5 * CAPACITY, ttft=ttft, count=600, adapters=8))
    assert sum(seconds > ttft for seconds in firsts) <= 0.02 * len(firsts)
    assert len(firsts) >= 0.6 * 600, "the batch is full all the time"
    assert refusals and max(refusals) <= ttft


@pytest.mark.slow
def test_below_capacity_nobody_is_refused_however_tight_the_target() -> None:
    for ttft, tpot in [(0.001, 0.03), (0.5, 0.5)]:
        firsts, refusals = ends(live(0.5 * CAPACITY, ttft=ttft, tpot=tpot))
        assert refusals == [] and len(firsts) == 200


def test_requests_that_may_not_be_shed_wait() -> None:
    firsts, refusals = ends(live(2 * CAPACITY, ttft=0.4, shed=False))
    assert refusals == [] and max(firsts) > 2.0
