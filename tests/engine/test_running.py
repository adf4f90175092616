"""Deadlines of the running requests, as the policy sees them."""

from __future__ import annotations

import math
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from coserve.engine.running import RunningRequests
from coserve.link import Tokens
from coserve.queues.policy import Due
from coserve.types import Slo


class Request(NamedTuple):
    slo: Slo
    steps: int
    tokens: int
    has: int
    """Tokens so far."""


numbers = st.integers(1, 3)
requests = st.builds(
    Request, st.builds(Slo, ttft=numbers, tpot=numbers, e2e=st.none() | numbers), numbers, numbers, st.integers(0, 2)
)


def dues(request: Request, came: float, now: float) -> list[Due]:
    slo, steps = request.slo, 1 if request.has else request.steps
    following = Due(now + slo.tpot, 1, 0, slo.tpot) if request.has else Due(came + slo.ttft, steps, 0, slo.ttft)
    if slo.e2e is None:
        return [following]
    return [following, Due(came + slo.e2e, steps, max(0, request.tokens - request.has - 1), slo.e2e)]


@given(st.lists(st.tuples(requests, st.integers(0, 3)), max_size=8))
def test_the_first_deadline_of_each_kind_is_seen(batch: list[tuple[Request, int]]) -> None:
    running, now, expected = RunningRequests(), 9.0, dict[tuple[int, int, float], float]()
    for i, (one, came) in enumerate(batch):
        end = math.inf if one.slo.e2e is None else came + one.slo.e2e
        running.add(f"r{i}", one.slo, deadline=came + one.slo.ttft, steps=one.steps, end=end, tokens=one.tokens)
        assert running.step_kind() == "prefill"
        for due, *about in dues(one, came, now):
            steps, decodes, window = about
            key = int(steps), int(decodes), window
            expected[key] = min(due, expected.get(key, math.inf))
    running.accept([Tokens(id=f"r{i}", tokens=(1,) * one.has, finished=None) for i, (one, _) in enumerate(batch)], now)
    assert {(due.steps, due.decodes, due.window): due.deadline for due in running.view()} == expected
    assert running.step_kind() == ("decode" if all(one.has for one, _ in batch) else "prefill")
