"""Deadlines of whole answers, kept by the real tick and policy in virtual time."""

from __future__ import annotations

import pytest

from coserve.core.link.generation import Generate
from coserve.core.link.jobs import StartJob
from coserve.core.link.link import ToEngine
from coserve.core.types import Slo
from coserve.queues.policies.slack import Slack
from tests.support.fake_ports import JobPlan, Prices
from tests.support.records import make_request
from tests.support.scenario import Scenario, job_spec, play

TOKENS, STEP = 20, 0.02


def request(id: str, e2e: float | None) -> Generate:
    return make_request(id, TOKENS, prompt=8, slo=Slo(ttft=2.0, tpot=0.5, e2e=e2e))


def seconds(e2e: float | None, weight: float = 1.0) -> float:
    """That a request takes beside a job, once steps have been measured."""
    script: list[tuple[float, ToEngine]] = [
        (0.0, StartJob(spec=job_spec("j"))),
        (0.0, request("first", 0.5)),
        (5.0, request("r", e2e)),
    ]
    scenario = Scenario(
        policy=Slack(patience=1e9, weight=weight),
        script=tuple(script),
        plans={"j": JobPlan(300, 8, 1 << 20, None)},
        prices=Prices(step=STEP, token=0.0, micro_step=0.01, spikes=0.0),
        max_running=4,
    )
    outcome = play(scenario)
    return outcome.of("r")[-1][0] - outcome.sent["r"]


@pytest.mark.parametrize("e2e", [1.0, 2.0, 4.0])
def test_training_leaves_time_for_the_last_token(e2e: float) -> None:
    """It uses most of the time before, though."""
    assert 0.5 * e2e < seconds(e2e) <= e2e


def test_without_a_deadline_of_the_last_token_each_token_takes_its_time() -> None:
    assert seconds(None) > 0.5 * TOKENS * 0.5


def test_a_deadline_that_cannot_be_kept_is_served_at_full_speed() -> None:
    assert seconds(0.1) < (TOKENS + 2) * STEP + 0.1


def test_less_weight_of_training_makes_answers_faster() -> None:
    fast, middle, slow = (seconds(None, weight) for weight in (0.0, 0.5, 1.0))
    assert fast < (TOKENS + 2) * STEP + 0.1
    assert 0.4 * slow < middle < 0.6 * slow


def test_less_weight_of_training_makes_whole_answers_faster() -> None:
    assert 0.4 < seconds(2.0, 0.5) <= 1.0
