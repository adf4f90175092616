"""What the scheduler proposes, and the deadlines of the requests in the batch, as policies see them."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coserve.core.grammar import Grammar
from coserve.core.link.generation import Generate, Tokens
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, Slo
from coserve.generate.plan import Scheduled, step_shape
from coserve.generate.schedule import Scheduler
from coserve.lora.store.pages import Activated
from coserve.queues.deadlines import Deadlines
from coserve.queues.policy import Due
from coserve.queues.request import Request, State
from coserve.queues.shapes import StepShape
from tests.support.pages import BareAdapters, BarePages, next_scheduled
from tests.support.shapes import and_prompt

SLO = Slo(ttft=2.0, tpot=0.5)


def asked(
    id: str, prompt: int, *, slo: Slo = SLO, tokens: int = 9, arrived: float = 0.0, adapter: str | None = None
) -> Request:
    sampling, ref = SamplingParams(max_tokens=tokens), None if adapter is None else AdapterRef(adapter, 1)
    return Request(Generate(id=id, prompt=(1,) * prompt, sampling=sampling, adapter=ref, slo=slo), arrived)


class Batch:
    """A scheduler with pages for all, and steps of so many tokens. Its requests are r0, r1, ... with two adapters in
    turn."""

    def __init__(self, *prompts: int, step_tokens: int = 100) -> None:
        self.adapters = BareAdapters()
        self.scheduler = Scheduler(BarePages(4000, 16), self.adapters, max_running=64, step_tokens=step_tokens)
        for number, prompt in enumerate(prompts):
            self.scheduler.add(asked(f"r{number}", prompt, adapter="ab"[number % 2]))

    def __getitem__(self, id: str) -> Request:
        return self.scheduler.requests[id]

    def launch(self) -> list[Scheduled]:
        """A step is in flight then. Returns what it computes."""
        scheduled = next_scheduled(self.scheduler)
        for item in scheduled:
            last = item.tokens == item.request.pending
            item.request.computed += item.tokens
            item.request.in_flight += last
        self.scheduler.changed()
        return scheduled

    def collect(self, now: float) -> None:
        came = list[Tokens]()
        for request in [*self.scheduler.requests.values()]:
            if request.in_flight:
                request.in_flight -= 1
                finished = request.push(1)
                came.append(Tokens(id=request.id, tokens=(1,), finished=finished))
                if finished:
                    self.scheduler.remove(request)
        self.scheduler.tokens_came(came, now)

    def step(self, now: float = 0.0) -> None:
        self.launch()
        self.collect(now)

    def dues(self, collected: float | None = None) -> tuple[Due, ...]:
        return self.scheduler.propose().deadlines.view(collected)


def test_a_plan_is_what_is_committed() -> None:
    """Decodes, chunks of prompts, and those that wait if they are admitted; and it takes no pages."""
    batch = Batch(30, 90, 5)
    for prompt in (90, 90):
        batch.scheduler.arrive(asked(f"w{prompt}{len(batch.scheduler.queue)}", prompt))
    for _ in range(4):
        plan = batch.scheduler.propose()
        scheduled = batch.scheduler.commit(plan, 0, now=0.0)
        assert step_shape(scheduled, batch.adapters.size) == plan.admitting_nobody
        assert batch.scheduler.propose().waiting == plan.waiting
        for item in scheduled:
            own = item.request
            own.started = True
            own.in_flight += item.tokens == own.pending
            own.computed += item.tokens
        batch.collect(0.0)
    plan = batch.scheduler.propose()
    assert (plan.queued, [request.id for request in plan.waiting]) == (2, ["w900", "w901"])
    scheduled = batch.scheduler.commit(plan, now=0.0)
    assert step_shape(scheduled, batch.adapters.size) == plan.admitting_all
    assert plan.admitting_all == and_prompt(and_prompt(plan.admitting_nobody, 90), 7)


def test_a_proposal_changes_nothing() -> None:
    pages = BarePages(8, 16)
    scheduler = Scheduler(pages, BareAdapters(), max_running=8, step_tokens=64)
    scheduler.arrive(request := asked("r", 20, adapter="a"))
    plan = scheduler.propose()
    assert (pages.pool.used, request.state, request.pages, len(scheduler), len(scheduler.queue)) == (
        0,
        State.QUEUED,
        (),
        0,
        1,
    )
    assert [item.request for item in scheduler.commit(plan, now=0.0)] == [request]
    assert (pages.pool.used, request.state, len(scheduler), len(scheduler.queue)) == (2, State.ACTIVE, 1, 0)


def test_the_next_step_is_known_from_what_was_computed() -> None:
    batch = Batch(30, 90, 5)
    assert batch.scheduler.propose().admitting_nobody == and_prompt(and_prompt(StepShape(adapter_bytes=200), 30), 70)
    batch.step()
    assert batch.scheduler.propose().admitting_nobody == and_prompt(and_prompt(StepShape(1, 31, 0, 0, 200), 20, 70), 5)
    batch.launch()
    assert batch.scheduler.propose().admitting_nobody == StepShape(3, 32 + 91 + 6, 0, 0, 200), "they are in flight"
    batch.collect(0.1)
    batch.scheduler.remove(batch["r1"])
    assert batch.scheduler.propose().admitting_nobody == StepShape(2, 32 + 6, 0, 0, 100)
    for id in ("r0", "r2"):
        batch.scheduler.remove(batch[id])
    assert batch.scheduler.propose().admitting_nobody == StepShape()


def test_who_waits_for_an_adapter_holds_a_place_and_enters_when_it_was_read() -> None:
    batch, cold = Batch(), AdapterRef("cold", 1)
    scheduler = batch.scheduler
    batch.adapters.unread.add(cold)
    scheduler.arrive(first := asked("first", 5, adapter="cold"))
    scheduler.arrive(second := asked("second", 5))
    assert [item.request for item in next_scheduled(scheduler)] == [second]
    assert (first.state, scheduler.loading, scheduler.headroom) == (State.LOADING, [first], 62)
    scheduler.take_loaded()
    assert first.state is State.LOADING
    batch.adapters.unread.clear()
    scheduler.take_loaded()
    assert (first.state, scheduler.loading, batch.adapters.awaited) == (State.ACTIVE, [], [])


def test_who_waits_for_an_adapter_waits_again_for_a_grammar_that_was_dropped_meanwhile() -> None:
    """Others displaced it in the cache: it is compiled again on its thread, not by the step that needs it."""
    adapters, cold, grammar = BareAdapters(), AdapterRef("cold", 1), Grammar("regex", "a")
    compiled = {grammar}
    scheduler = Scheduler(BarePages(9, 16), adapters, max_running=8, step_tokens=64, compiled=compiled.__contains__)
    adapters.unread.add(cold)
    scheduler.arrive(waits := Request(replace(asked("waits", 5, adapter="cold").message, grammar=grammar)))
    assert not next_scheduled(scheduler) and scheduler.loading == [waits]
    compiled.clear()
    adapters.unread.clear()
    scheduler.take_loaded()
    assert (waits.state, scheduler.loading) == (State.LOADING, [waits])
    compiled.add(grammar)
    scheduler.take_loaded()
    assert (waits.state, scheduler.loading, adapters.awaited) == (State.ACTIVE, [], [])


class Larger(BareAdapters):
    """An adapter takes `pages` pages, though it was said to need none: its LoRA servers were lost in between."""

    def __init__(self, pool: BarePages, pages: int) -> None:
        super().__init__()
        self.pages, self._pool, self._held = pages, pool, list[int]()

    def activate(self, ref: AdapterRef) -> Activated | None:
        self._held = self._pool.allocate(self.pages) or []
        return super().activate(ref)

    def deactivate(self, ref: AdapterRef) -> None:
        self._pool.free(self._held)


def test_a_request_whose_adapter_took_more_pages_than_it_needed_waits_for_them() -> None:
    adapters = Larger(pages := BarePages(3, 16), 2)
    scheduler = Scheduler(pages, adapters, max_running=8, step_tokens=64)
    scheduler.arrive(request := asked("r", 20, adapter="a"))
    assert not next_scheduled(scheduler)
    assert (request.state, request.pages, pages.pool.used) == (State.ACTIVE, (), 0)
    adapters.pages = 1
    assert [item.request for item in next_scheduled(scheduler)] == [request]
    assert pages.pool.used == 3


@pytest.mark.parametrize("ends", ["cancelled", "broken"])
def test_who_waits_for_an_adapter_that_does_not_come_ends_alone(ends: str) -> None:
    adapters, failed = BareAdapters(), list[str]()
    scheduler = Scheduler(
        BarePages(9, 16),
        adapters,
        max_running=8,
        step_tokens=64,
        failed=lambda request, error: failed.append(f"{request.id}: {type(error).__name__}"),
    )
    adapters.unread.add(AdapterRef("cold", 1))
    scheduler.arrive(request := asked("r", 5, adapter="cold"))
    next_scheduled(scheduler)
    if ends == "cancelled":
        scheduler.remove(request)
    else:
        adapters.broken.add(AdapterRef("cold", 1))
        adapters.unread.clear()
        scheduler.take_loaded()
    assert failed == ([] if ends == "cancelled" else ["r: LookupError"])
    assert (request.state, scheduler.loading, adapters.awaited, scheduler.requests) == (State.ENDED, [], [], {})


def test_an_id_that_runs_is_refused() -> None:
    batch = Batch(5)
    with pytest.raises(Exception, match="which is running"):
        batch.scheduler.arrive(asked("r0", 5))


def test_where_a_step_has_fewer_tokens_a_prompt_takes_more_of_them() -> None:
    """After memory has run out."""
    batch = Batch(80)
    assert [due.steps for due in batch.dues()] == [1]
    batch.scheduler.budget.lower(20)
    batch.scheduler.changed()
    plan = batch.scheduler.propose()
    assert (plan.step_tokens, plan.admitting_nobody.prefill) == (10, 10)
    assert [due.steps for due in batch.dues()] == [8]
    steps = 0
    while batch["r0"].came is None:
        batch.step()
        steps += 1
    assert steps == 8


# ---- deadlines


class Case(NamedTuple):
    slo: Slo
    prompt: int
    tokens: int
    has: bool
    """A token."""


numbers = st.integers(1, 3)
cases = st.builds(
    Case, st.builds(Slo, ttft=numbers, tpot=numbers, e2e=st.none() | numbers), numbers, numbers, st.booleans()
)
STEP_TOKENS = 2


def expected_dues(case: Case, arrived: float, now: float, pending: int) -> list[Due]:
    """`pending`: tokens of prompts to compute until its prompt is done."""
    slo, steps = case.slo, 1 if case.has else -(-pending // STEP_TOKENS)
    following = Due(now + slo.tpot, 1, 0, slo.tpot) if case.has else Due(arrived + slo.ttft, steps, 0, slo.ttft)
    if slo.e2e is None:
        return [following]
    return [following, Due(arrived + slo.e2e, steps, max(0, case.tokens - case.has - 1), slo.e2e)]


@given(st.lists(st.tuples(cases, st.integers(0, 3)), max_size=8))
def test_the_first_deadline_of_each_kind_is_seen(batch: list[tuple[Case, int]]) -> None:
    now, pending, expected, requests = 9.0, 0, dict[tuple[int, int, float], float](), list[Request]()
    for i, (one, arrived) in enumerate(batch):
        request = asked(f"r{i}", one.prompt, slo=one.slo, tokens=one.tokens, arrived=arrived)
        requests.append(request)
        if one.has:
            request.computed = one.prompt
            request.push(1)
            request.token_came(now)
        pending += 0 if one.has else one.prompt
        for due, *about in expected_dues(one, arrived, now, pending):
            steps, decodes, window, *_ = about
            key = int(steps), int(decodes), window
            expected[key] = min(due, expected.get(key, math.inf))
    found = dict[tuple[int, int, float], float]()
    for due in Deadlines(requests, STEP_TOKENS).view():
        key = due.steps, due.decodes, due.window
        found[key] = min(due.deadline, found.get(key, math.inf))
    assert found == expected


def test_a_prompt_of_several_steps_is_seen_as_such_until_its_last_one_is_launched() -> None:
    batch = Batch(250)
    assert [(due.first, due.steps) for due in batch.dues()] == [(True, 3)]
    for steps in (2, 1):
        batch.launch()
        assert [(due.first, due.steps) for due in batch.dues()] == [(True, steps)]
        assert batch.dues(collected=1.0) == batch.dues()
    batch.launch()
    assert [due.first for due in batch.dues()] == [True], "without a step in flight it was undone"
    assert batch.dues(collected=1.0) == (Due(1.5, 1, 0, 0.5),), "the step in flight computes its first token"


def test_tokens_in_flight_move_the_deadlines_of_the_next_tokens_alone() -> None:
    batch = Batch(1, step_tokens=4)
    batch.step(7.0)
    batch.scheduler.add(asked("late", 3))
    assert set(batch.dues()) == {Due(7.5, 1, 0, 0.5), Due(2.0, 1, 0, 2.0, first=True)}
    assert set(batch.dues(collected=7.5)) == {Due(8.0, 1, 0, 0.5), Due(2.0, 1, 0, 2.0, first=True)}
    assert set(batch.dues(collected=7.25)) == {Due(8.0, 1, 0, 0.5, 0.25), Due(2.0, 1, 0, 2.0, first=True)}


def test_tokens_after_first_ones_in_flight_have_deadlines() -> None:
    batch = Batch()
    for id, tpot, tokens in (("a", 0.5, 9), ("b", 0.2, 9), ("c", 0.1, 1), ("d", 0.5, 9)):
        batch.scheduler.add(asked(id, 10, slo=Slo(ttft=1.0, tpot=tpot), tokens=tokens))
    batch.launch()
    assert set(batch.dues(collected=7.0)) == {Due(7.5, 1, 0, 0.5), Due(7.2, 1, 0, 0.2)}, "one has no second token"


def test_an_early_token_lends_its_time_to_the_next_ones_and_a_late_one_takes_it_from_them() -> None:
    request = asked("r", 1)
    for at, due, credit in [
        (7.0, 7.5, 0.0),
        (7.4, 8.0, 0.1),
        (7.5, 8.25, 0.25),
        (8.35, 8.75, -0.1),
        (99.0, 99.0, -0.5),
    ]:
        request.token_came(at)
        found = Deadlines([request], 100).view()
        assert found == (Due(pytest.approx(due), 1, 0, 0.5, pytest.approx(credit)),)


@pytest.mark.parametrize("order", [("early", "late"), ("late", "early")])
def test_whose_token_came_first_is_due_first_where_training_has_less_weight(order: tuple[str, str]) -> None:
    """Its tokens came early, so without weight it may wait for longer than the other one."""
    requests = {id: asked(id, 1) for id in order}
    for id, at in (("early", 7.0), ("early", 7.1), ("early", 7.2), ("late", 7.4)):
        requests[id].token_came(at)
    (due,) = Deadlines(requests.values(), 100).view()
    assert due.deadline == pytest.approx(7.9), "of the late one"
    assert due.deadline - due.window - due.credit == pytest.approx(7.2), "the first token's time"
