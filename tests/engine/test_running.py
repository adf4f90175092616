"""Deadlines of the running requests, as the policy sees them."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.engine.running import FEW_FIRSTS, RunningRequests
from coserve.link import Generate, Tokens
from coserve.queues.inference import Queued
from coserve.queues.policy import Due
from coserve.queues.shapes import StepShape
from coserve.types import FinishReason, SamplingParams, Slo


class Request(NamedTuple):
    slo: Slo
    prompt: int
    tokens: int
    has: int
    """Tokens so far."""


numbers = st.integers(1, 3)
requests = st.builds(
    Request, st.builds(Slo, ttft=numbers, tpot=numbers, e2e=st.none() | numbers), numbers, numbers, st.integers(0, 2)
)


STEP_TOKENS = 2


def dues(request: Request, came: float, now: float, pending: int) -> list[Due]:
    """`pending`: tokens of prompts to compute until its prompt is done."""
    slo, steps = request.slo, 1 if request.has else -(-pending // STEP_TOKENS)
    following = Due(now + slo.tpot, 1, 0, slo.tpot) if request.has else Due(came + slo.ttft, steps, 0, slo.ttft)
    if slo.e2e is None:
        return [following]
    return [following, Due(came + slo.e2e, steps, max(0, request.tokens - request.has - 1), slo.e2e)]


@given(st.lists(st.tuples(requests, st.integers(0, 3)), max_size=8))
def test_the_first_deadline_of_each_kind_is_seen(batch: list[tuple[Request, int]]) -> None:
    running, now, expected = RunningRequests(STEP_TOKENS), 9.0, dict[tuple[int, int, float], float]()
    pending = 0
    for i, (one, came) in enumerate(batch):
        end = math.inf if one.slo.e2e is None else came + one.slo.e2e
        running.add(
            f"r{i}", one.slo, now=0.0, deadline=came + one.slo.ttft, prompt=one.prompt, end=end, tokens=one.tokens
        )
        assert running.step_kind() == "prefill"
        pending += 0 if one.has else one.prompt
        for due, *about in dues(one, came, now, pending):
            steps, decodes, window, *_ = about
            key = int(steps), int(decodes), window
            expected[key] = min(due, expected.get(key, math.inf))
    running.accept([Tokens(id=f"r{i}", tokens=(1,) * one.has, finished=None) for i, (one, _) in enumerate(batch)], now)
    found = dict[tuple[int, int, float], float]()
    for due in running.view():
        key = due.steps, due.decodes, due.window
        found[key] = min(due.deadline, found.get(key, math.inf))
    assert found == expected
    assert running.step_kind() == ("decode" if all(one.has for one, _ in batch) else "prefill")


def batch(*prompts: int, step_tokens: int = 100) -> RunningRequests:
    running = RunningRequests(step_tokens)
    for i, prompt in enumerate(prompts):
        running.add(
            f"r{i}", Slo(ttft=2.0, tpot=0.5), now=0.0, deadline=2.0, prompt=prompt, tokens=9, adapter=i % 2,
            adapter_bytes=10,
        )  # fmt: skip
    return running


def token(id: str, finished: FinishReason | None = None) -> Tokens:
    return Tokens(id=id, tokens=(1,), finished=finished)


def test_a_prompt_of_several_steps_is_seen_as_such_until_its_last_one_is_launched() -> None:
    running = batch(250)
    assert [due.first for due in running.view()] == [True]
    for left in (150, 50):
        running.computed({"r0": left})
        assert [due.first for due in running.view()] == [True]
        assert running.view(collected=1.0) == running.view()
    running.computed({"r0": 0})
    assert [due.first for due in running.view()] == [True], "without a step in flight it was undone"
    assert running.view(collected=1.0) == (Due(1.5, 1, 0, 0.5),), "the step in flight computes its first token"


def test_the_next_step_is_known_from_what_was_computed() -> None:
    running = batch(30, 90, 5)
    assert running.next_step(()) == StepShape(adapter_bytes=20).and_prompt(30).and_prompt(70)
    running.computed({"r0": 0, "r1": 20})
    running.accept([token("r0")], 0.0)
    assert running.next_step(()) == StepShape(1, 31, 0, 0, 20).and_prompt(20, 70).and_prompt(5)
    running.computed({"r1": 0, "r2": 0})
    assert running.next_step(()) == StepShape(3, 126, 0, 0, 20), "their first tokens are in flight"
    running.accept([token("r0"), token("r1"), token("r2")], 0.1)
    assert running.next_step(()) == StepShape(3, 32 + 91 + 6, 0, 0, 20)
    waiting = [Queued(generate(prompt), 0.0, 1.0) for prompt in (90, 90)]
    assert running.next_step(waiting) == StepShape(3, 129, 0, 0, 20).and_prompt(90).and_prompt(7)
    running.accept([token("r1", FinishReason.LENGTH), token("r0", FinishReason.LENGTH)], 0.2)
    assert running.next_step(()) == StepShape(1, 6, 0, 0, 10)
    assert running.remove("r2")
    assert running.next_step(()) == StepShape()


def generate(prompt: int) -> Generate:
    return Generate(id="w", prompt=(1,) * prompt, sampling=SamplingParams(), adapter=None, slo=Slo(ttft=1.0, tpot=1.0))


def test_a_prompt_under_way_takes_fewer_steps() -> None:
    running = batch(250)
    assert [due.steps for due in running.view()] == [3]
    running.computed({"r0": 150})
    assert [due.steps for due in running.view()] == [2]


def test_tokens_in_flight_move_the_deadlines_of_the_next_tokens_alone() -> None:
    running = batch(1, 1)
    running.accept([token("r0")], 7.0)
    assert set(running.view()) == {Due(7.5, 1, 0, 0.5), Due(2.0, 1, 0, 2.0, first=True)}
    assert set(running.view(collected=7.5)) == {Due(8.0, 1, 0, 0.5), Due(2.0, 1, 0, 2.0, first=True)}
    assert set(running.view(collected=7.25)) == {Due(8.0, 1, 0, 0.5, 0.25), Due(2.0, 1, 0, 2.0, first=True)}


def test_tokens_after_first_ones_in_flight_have_deadlines() -> None:
    running = RunningRequests(100)
    for id, tpot, tokens in (("a", 0.5, 9), ("b", 0.2, 9), ("c", 0.1, 1), ("d", 0.5, 9)):
        running.add(id, Slo(ttft=1.0, tpot=tpot), now=0.0, deadline=1.0, prompt=10, tokens=tokens)
    running.computed(dict.fromkeys("abcd", 0))
    assert set(running.view(collected=7.0)) == {Due(7.5, 1, 0, 0.5), Due(7.2, 1, 0, 0.2)}, "one has no second token"


def test_answers_are_expected_to_be_as_long_as_others_were() -> None:
    running = batch(1, 1)
    asked = SamplingParams(max_tokens=9)
    assert running.expected_decodes(asked) == 0, "not known"
    assert running.expected_decodes(SamplingParams(max_tokens=9, ignore_eos=True)) == 8
    assert running.expected_decodes(SamplingParams(max_tokens=9, min_tokens=4)) == 3
    for _ in range(3):
        running.accept([token("r0")], 1.0)
    running.accept([token("r0", FinishReason.STOP)], 1.0)
    assert running.expected_decodes(asked) == 3
    running.accept([token("r1"), token("r1", FinishReason.STOP)], 1.0)
    assert running.expected_decodes(asked) == 2, "the mean of both"
    assert running.expected_decodes(SamplingParams(max_tokens=2)) == 1


def test_an_early_token_lends_its_time_to_the_next_ones_and_a_late_one_takes_it_from_them() -> None:
    running = batch(1)
    for at, due, credit in [
        (7.0, 7.5, 0.0),
        (7.4, 8.0, 0.1),
        (7.5, 8.25, 0.25),
        (8.35, 8.75, -0.1),
        (99.0, 99.0, -0.5),
    ]:
        running.accept([token("r0")], at)
        assert running.view() == (Due(pytest.approx(due), 1, 0, 0.5, pytest.approx(credit)),)


@pytest.mark.parametrize("order", [("early", "late"), ("late", "early")])
def test_whose_token_came_first_is_due_first_where_training_has_less_weight(order: tuple[str, str]) -> None:
    """Its tokens came early, so without weight it may wait for longer than the other one."""
    running = RunningRequests(100)
    for id in order:
        running.add(id, Slo(ttft=2.0, tpot=0.5), now=0.0, deadline=2.0, prompt=1, tokens=9)
    for id, at in (("early", 7.0), ("early", 7.1), ("early", 7.2), ("late", 7.4)):
        running.accept([token(id)], at)
    (due,) = running.view()
    assert due.deadline == pytest.approx(7.9), "of the late one"
    assert due.deadline - due.window - due.credit == pytest.approx(7.2), "the first token's time"


def test_how_long_a_first_token_takes_is_known_from_the_latest_steps() -> None:
    """Of prompts of one step. Two in a step count once."""
    running = RunningRequests(100)
    for number in range(100):
        assert (running.first_token_seconds == 0) == (number < FEW_FIRSTS)
        at = 20.0 * number
        for id, prompt in (("a", 90), ("b", 90), ("long", 900)):
            running.add(id, Slo(ttft=2.0, tpot=0.5), now=at, deadline=at + 2.0, prompt=prompt, tokens=9)
        seconds = 10.0 if number == 1 else 0.25
        running.accept([token("a"), token("b", FinishReason.STOP)], at + seconds)
        running.accept([token("long")], at + seconds + 5.0)
        if number >= FEW_FIRSTS:
            assert running.first_token_seconds == 0.25
        running.remove("a")
        running.remove("long")


def test_who_passed_over_was_passed_over_by_a_step() -> None:
    """One that has just joined was not."""
    running = batch(10, 20)
    assert not running.passed_over("r0") and not running.passed_over("r1")
    assert running.start(["r0", "gone"]) == ["r0"]
    assert not running.passed_over("r0") and running.passed_over("r1")
    assert running.start(["r1"]) == ["r1"]
    assert not running.passed_over("r1")


def test_seconds_of_a_token_are_those_of_whole_answers() -> None:
    running = RunningRequests(100)
    assert running.token_seconds == 0
    for number in range(20):
        running.add("a", Slo(ttft=2.0, tpot=0.5), now=0.0, deadline=2.0, prompt=10, tokens=9)
        running.accept([token("a")], 1.0)
        running.accept([token("a")], 1.1)
        running.accept([token("a", FinishReason.STOP)], 1.5 if number < 19 else 9.0)
    assert running.token_seconds == pytest.approx(0.25)


def test_a_prompt_that_a_step_in_flight_computes_decodes_next() -> None:
    """Unless its first token is its last."""
    running = batch(10, 20)
    running.add("one", Slo(ttft=2.0, tpot=0.5), now=0.0, deadline=2.0, prompt=5, tokens=1)
    running.computed({"one": 0})
    running.computed({"r0": 0})
    assert running.step_kind() == "prefill" and running.next_step(())[:3] == (1, 10, 20)
    running.computed({"r1": 0})
    assert running.step_kind() == "decode" and running.next_step(())[:3] == (2, 30, 0)


def test_how_much_of_long_prompts_is_in_the_prefix_cache_is_learned() -> None:
    """Steps of 100 tokens. Of prompts of 1,000 tokens 950 are cached, but of few."""
    running = RunningRequests(100)
    for number in range(40):
        assert running.uncached_share == (1.0 if number < 10 else 0.1)
        running.add("a", Slo(ttft=2.0, tpot=0.5), now=0.0, deadline=2.0, prompt=1000, tokens=9)
        if number == 30:
            running.computed({"a": 900})
        running.computed({"a": 0})
        running.accept([token("a", FinishReason.STOP)], 1.0)
    for _ in range(20):
        running.add("a", Slo(ttft=2.0, tpot=0.5), now=0.0, deadline=2.0, prompt=1000, tokens=9)
        running.computed({"a": 900})
        running.remove("a")
    assert running.uncached_share == 1.0
