"""First tokens beside training: a request is answered as soon as one in the queue would be, wherever its prompt
waits."""

from __future__ import annotations

import pytest

from coserve.core.link.generation import Admitted, Generate, Tokens
from coserve.core.link.jobs import StartJob
from coserve.core.types import AdapterRef, Slo
from coserve.queues.policies.overlap import Overlap
from coserve.queues.policies.slack import Slack
from coserve.queues.policy import Policy
from tests.support.fake_ports import JobPlan, Prices
from tests.support.records import make_request
from tests.support.scenario import Scenario, job_spec, play

COLD = 0.01
"""Seconds in which an adapter is read."""
WAIT, STEP = 0.12, 0.05
"""Most that a first token may wait for the batch's next step, and more than a step and a slice take."""
TIMES = (2.0, 12.0, 22.0)


@pytest.mark.parametrize("ttft", [1.0, 60.0])
@pytest.mark.parametrize("policy", [Slack(1.0, floor=0.05), Overlap(1.0, floor=0.05)], ids=["slack", "overlap"])
def test_a_request_whose_adapter_is_read_waits_no_longer_than_others(policy: Policy, ttft: float) -> None:
    """It joins the batch without having been in the queue again."""
    script = [(0.0, StartJob(spec=job_spec("j0"))), *((at, request(number, ttft)) for number, at in enumerate(TIMES))]
    played = play(
        Scenario(
            policy=policy,
            script=tuple(script),
            plans={"j0": JobPlan(120, 64, 1000, None)},
            prices=Prices(step=0.01, token=1e-4, micro_step=0.004, spikes=0.0),
            max_running=8,
            cold=COLD,
            share=0.5 if isinstance(policy, Overlap) else None,
        )
    )
    for number in range(len(TIMES)):
        first = next(at for at, message in played.of(f"r{number}") if isinstance(message, Tokens))
        assert first - played.sent[f"r{number}"] <= COLD + WAIT + STEP


def request(number: int, ttft: float) -> Generate:
    return make_request(f"r{number}", 4, adapter=AdapterRef(f"a{number}", 1), slo=Slo(ttft=ttft, tpot=0.05))


def test_a_requests_queue_time_ends_when_its_first_step_begins() -> None:
    script = tuple((float(number), request(number, 1.0)) for number in range(3))
    played = play(
        Scenario(
            policy=Slack(1.0),
            script=script,
            prices=Prices(step=0.5, token=0.0, micro_step=0.0, spikes=0.0),
            max_running=8,
        )
    )
    for number in range(3):
        messages = played.of(f"r{number}")
        first = next(at for at, message in messages if isinstance(message, Tokens))
        (admitted,) = (message for _, message in messages if isinstance(message, Admitted))
        assert first - admitted.at == pytest.approx(0.5)
        assert admitted.at - played.sent[f"r{number}"] < 0.51, "the rest of a step of the request before"
