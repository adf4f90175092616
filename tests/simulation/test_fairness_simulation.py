"""One adapter floods the engine, others ask now and then: the real tick, queue and policies in virtual time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from coserve.core.link.generation import Generate, RequestFailed, Tokens
from coserve.core.types import AdapterRef, Slo
from coserve.queues.inference import QUANTUM
from tests.support.examples import examples, sample
from tests.support.fake_ports import Prices
from tests.support.records import make_request
from tests.support.scenario import Outcome, Scenario, make_scenario, play

COST, RUNNING, LIGHT = 64, 4, 5


def request(id: str, adapter: str | None, cost: int) -> Generate:
    ref = None if adapter is None else AdapterRef(adapter, 1)
    return make_request(id, cost - cost // 2, prompt=cost // 2, adapter=ref, slo=Slo(ttft=1.0, tpot=0.2))


def flood(seed: int, policy: str, *, fair: bool, max_queue: int) -> Scenario:
    """150 requests of one adapter at once and 50 more on the way; ten of others, two each, later on."""
    chance = random.Random(seed)
    script = [(0.0 if i < 150 else chance.uniform(0, 3), request(f"hot{i}", "hot", COST)) for i in range(200)]
    for i in range(2 * LIGHT):
        name = None if i % LIGHT == 0 else f"light{i % LIGHT}"
        script.append((chance.uniform(0.2, 2), request(f"x{i}", name, chance.randint(2, COST))))
    return replace(
        make_scenario(seed, policy=policy, calm=True),
        script=tuple(sorted(script, key=lambda event: event[0])),
        prices=Prices(step=0.01, token=0.0, micro_step=0.01, spikes=0.0),
        max_running=RUNNING,
        max_queue=max_queue,
        fair=fair,
    )


def passed(outcome: Outcome, id: str) -> int:
    """Requests of the hot adapter that were admitted while this one waited."""
    admitted = outcome.generator.admitted
    return sum(outcome.sent[id] < at < admitted[id] for other, at in admitted.items() if other.startswith("hot"))


def light(outcome: Outcome) -> list[str]:
    return [id for id in outcome.sent if id.startswith("x")]


@pytest.mark.parametrize("case", sample([("slack", 50), ("slack", 1000), ("ets", 1000), ("ts", 50)], ("slack", 50)))
def test_one_hot_adapter_starves_nobody(case: tuple[str, int]) -> None:
    """Also when it has filled the queue to the brim."""
    policy, max_queue = case
    for seed in range(examples(4)):
        outcome = play(flood(seed, policy, fair=True, max_queue=max_queue))
        for id in light(outcome):
            last = outcome.of(id)[-1][1]
            assert isinstance(last, Tokens), f"{id} was turned away"
            assert last.finished is not None
            # A turn that is under way, one more, and the batches that they end in.
            assert passed(outcome, id) <= 2 * QUANTUM // COST + 2 * RUNNING
        failed = [message for _, message in outcome.messages if isinstance(message, RequestFailed)]
        assert bool(failed) == (max_queue == 50)
        assert all(message.id.startswith("hot") for message in failed)
        assert all(message.code == "queue_full" and (message.retry_after or 0) >= 1 for message in failed)
        ended = outcome.ends()
        assert all(ended[id] == 1 for id in outcome.sent)


@pytest.mark.slow
def test_first_come_first_served_is_what_it_says() -> None:
    outcome = play(flood(0, "slack", fair=False, max_queue=1000))
    assert min(passed(outcome, id) for id in light(outcome)) > 100
    outcome = play(flood(0, "slack", fair=False, max_queue=50))
    assert any(isinstance(outcome.of(id)[-1][1], RequestFailed) for id in light(outcome))
