"""Policies, case by case: the boundaries of Algorithm 1, the turns of TS(n), the slack."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest

from coserve.config import Config
from coserve.core.errors import ConfigError
from coserve.queues.policies.choice import make_policy
from coserve.queues.policies.inference_first import InferenceFirst
from coserve.queues.policies.overlap import AHEAD, LONGEST, TIMER, Overlap
from coserve.queues.policies.paper import Ets, TemporalSharing
from coserve.queues.policies.slack import DECODE_MARGIN, DELIVERY, MAX_MICRO_STEPS, MAX_SLICE, Slack
from coserve.queues.policies.spatial import MIN_SLICE, Spatial
from coserve.queues.policy import Alternation, Costs, Decision, Due, InFlight, Overdue, Serve, Train, View, Wait


class Request(NamedTuple):
    """A waiting one."""

    arrived: float
    deadline: float
    pending: int = 1
    end: float = math.inf
    decodes: int = 0


def view(
    waiting: list[float] | None = None,
    running: list[float] | None = None,
    *,
    jobs: tuple[str, ...] = (),
    headroom: int = 64,
    alternation: Alternation = Alternation(),  # noqa: B008 - frozen
    train_waiting_since: float | None = None,
    serve: float = 0.0,
    micro_step: float = 0.0,
    ttft: float = 2.0,
) -> View:
    """`waiting`: arrivals; `running`: deadlines."""
    arrivals = waiting or []
    return View(
        waiting=tuple(Request(arrived, arrived + ttft) for arrived in arrivals[:headroom]),
        queued=len(arrivals),
        first_arrival=min(arrivals, default=None),
        running=tuple(Due(deadline) for deadline in running or []),
        step_tokens=64,
        jobs=jobs,
        alternation=alternation,
        train_waiting_since=train_waiting_since,
        costs=Costs(serve, micro_step, overlapped=serve),
    )


class TestEts:
    policy = Ets(batch_size=4, delay=5.0)

    def test_size_is_compared_with_at_least(self) -> None:
        assert self.policy.decide(view([0.0] * 3), 0.0) == Wait(pytest.approx(5.0))
        assert self.policy.decide(view([0.0] * 4), 0.0) == Serve(4)

    def test_delay_is_compared_with_more_than(self) -> None:
        assert self.policy.decide(view([0.0], jobs=("j",)), 5.0) == Train("j", None)
        assert self.policy.decide(view([0.0], jobs=("j",)), 5.0 + 2**-20) == Serve(1)

    def test_the_delay_counts_from_the_first_arrival(self) -> None:
        assert self.policy.decide(view([0.0, 4.0, 5.0]), 5.5) == Serve(3)
        assert self.policy.decide(view([1.0, 4.0, 5.0]), 5.5) == Wait(pytest.approx(6.0))

    def test_a_batch_that_waits_for_its_adapters_gives_the_turn_to_training(self) -> None:
        assert self.policy.decide(view([0.0] * 9, headroom=0, jobs=("j",)), 99.0) == Train("j", None)
        assert self.policy.decide(view([0.0] * 9, headroom=0), 99.0) == Wait(None)

    def test_waits_for_the_delay_or_for_a_change(self) -> None:
        assert self.policy.decide(view(), 3.0) == Wait(None)
        wait = self.policy.decide(view([2.0]), 3.0)
        assert isinstance(wait, Wait) and wait.until is not None
        assert self.policy.decide(view([2.0]), wait.until) == Serve(1), "a wake-up must not find the condition unmet"

    @pytest.mark.parametrize("first", [0.1, 1e5 + 0.3, 1e8 + 0.7])
    def test_the_wake_up_holds_on_clocks_that_ran_long(self, first: float) -> None:
        wait = self.policy.decide(view([first]), first)
        assert isinstance(wait, Wait) and wait.until is not None
        assert self.policy.decide(view([first]), wait.until) == Serve(1)


class TestTemporalSharing:
    policy = TemporalSharing(n=2, batch_size=4, delay=5.0)

    def test_a_job_has_its_turn_after_n_batches_whatever_waits(self) -> None:
        for batches, decision in [(0, Serve(4)), (1, Serve(4)), (2, Train("j", None)), (3, Train("j", None))]:
            seen = view([0.0] * 9, jobs=("j",), alternation=Alternation(batches_since_job=batches))
            assert self.policy.decide(seen, 99.0) == decision

    def test_the_turn_lasts_until_the_job_ends(self) -> None:
        under_way = view([0.0] * 9, jobs=("k", "j"), alternation=Alternation("j"))
        assert self.policy.decide(under_way, 99.0) == Train("j", None), "neither requests nor other jobs"
        prepares = view([0.0] * 9, jobs=("k",), alternation=Alternation("j"))
        assert self.policy.decide(prepares, 99.0) == Wait(None), "on a thread"
        assert self.policy.decide(view([0.0] * 9, jobs=("k",)), 99.0) == Serve(4)

    def test_a_dispatched_batch_is_performed_to_its_end(self) -> None:
        seen = view([], [1.0], jobs=("j",), alternation=Alternation("j", batches_since_job=9))
        assert self.policy.decide(seen, 99.0) == Serve(0)

    def test_a_batch_is_complete_after_the_delay_whoever_came_later(self) -> None:
        assert self.policy.decide(view([0.0, 5.0, 5.5, 6.0], jobs=("j",)), 7.0) == Serve(2)
        assert self.policy.decide(view([5.5, 6.0], jobs=("j",)), 7.0) == Train("j", None)
        assert self.policy.decide(view([0.0, 1.0, 2.0], headroom=2), 7.0) == Serve(2)

    def test_an_empty_side_gives_its_turn_away(self) -> None:
        assert self.policy.decide(view([0.0] * 4, alternation=Alternation(batches_since_job=9)), 0.0) == Serve(4), (
            "no job"
        )
        assert self.policy.decide(view(jobs=("j",)), 0.0) == Train("j", None), "no request"
        assert self.policy.decide(view([0.0], jobs=("j",)), 1.0) == Train("j", None), "no batch yet"

    def test_waits_as_ets_does(self) -> None:
        assert self.policy.decide(view(), 0.0) == Wait(None)
        assert self.policy.decide(view([1.0]), 2.0) == Wait(pytest.approx(6.0))

    def test_a_turn_may_be_one_batch(self) -> None:
        policy = TemporalSharing(n=2, batch_size=4, delay=5.0, unit="batch")
        for batches, decision in [(1, Serve(4)), (2, Train("j", None))]:
            seen = view([0.0] * 9, jobs=("j",), alternation=Alternation("j", 9, batches_since_micro_batch=batches))
            assert policy.decide(seen, 99.0) == decision


class TestInferenceFirst:
    policy = InferenceFirst()

    def test_admits_at_every_step(self) -> None:
        assert self.policy.decide(view([0.0] * 9, [9.0], headroom=3, jobs=("j",)), 0.0) == Serve(3)
        assert self.policy.decide(view([0.0], [9.0], headroom=0, jobs=("j",), train_waiting_since=-99.0), 0.0) == Serve(
            0
        )

    def test_trains_while_nobody_can_be_served_in_slices_that_a_newcomer_can_bear(self) -> None:
        assert self.policy.decide(view(jobs=("j", "k"), micro_step=MAX_SLICE / 4), 0.0) == Train("j", 4)
        assert self.policy.decide(view([0.0], headroom=0, jobs=("j",), micro_step=9.0), 0.0) == Train("j", 1)
        assert self.policy.decide(view(), 0.0) == Wait(None)


class TestSlack:
    policy = Slack(patience=1.0)

    def test_without_jobs_it_serves_and_admits_at_every_step(self) -> None:
        assert self.policy.decide(view([0.0] * 9, headroom=4), 0.0) == Serve(4)
        assert self.policy.decide(view([0.0] * 9, [9.0], headroom=0), 0.0) == Serve(0)
        assert self.policy.decide(view([0.0] * 9, [9.0], headroom=2), 0.0) == Serve(2)
        assert self.policy.decide(view(), 0.0) == Wait(None)

    def test_trains_freely_without_requests_in_slices_that_a_newcomer_can_bear(self) -> None:
        assert self.policy.decide(view(jobs=("j", "k"), micro_step=MAX_SLICE / 4), 0.0) == Train("j", 4)
        assert self.policy.decide(view(jobs=("j",), micro_step=1e-9), 0.0) == Train("j", MAX_MICRO_STEPS)
        assert self.policy.decide(view(jobs=("j",), micro_step=9.0), 0.0) == Train("j", 1)
        assert self.policy.decide(view(jobs=("j",)), 0.0) == Train("j", 1), "the cost is not known yet"

    @pytest.mark.parametrize(
        ("before", "decision"), [(1 / 32, Train("j", 2)), (1 / 64, Train("j", 1)), (1 / 65, Serve(0))]
    )
    def test_trains_only_where_the_tightest_deadline_leaves_room_for_a_micro_step(
        self, before: float, decision: object
    ) -> None:
        """And for its token's way to the client."""
        now = 1.0 - 1 / 8 - DELIVERY - before - 1e-9
        seen = view([], [1.0, 5.0], jobs=("j",), serve=1 / 8, micro_step=1 / 64, train_waiting_since=now)
        assert self.policy.decide(seen, now) == decision

    def test_the_waiting_press_as_the_running_do(self) -> None:
        due_soon = view([0.0], [9.0], jobs=("j",), serve=0.1, micro_step=0.01, ttft=0.1, train_waiting_since=0.0)
        assert self.policy.decide(due_soon, 0.0) == Serve(1)
        due_late = view([0.0], [9.0], jobs=("j",), serve=0.1, micro_step=0.04, ttft=2.0, train_waiting_since=0.0)
        assert self.policy.decide(due_late, 0.0) == Train("j", 1)

    def test_steps_until_the_token_count(self) -> None:
        def seen(steps: int) -> View:
            return View(
                (), 0, None, (Due(1.0, steps),), 64, ("j",), Alternation(), 0.0, Costs(serve=0.3, micro_step=0.02)
            )

        assert self.policy.decide(seen(3), 0.0) == Train("j", 2)
        assert self.policy.decide(seen(4), 0.0) == Serve(0)

    def test_steps_until_the_last_token_count(self) -> None:
        """Ten more tokens of 1/16 s each are due at 1 s: 1/8 s before, where the next step may bring a prompt."""
        costs = Costs(serve=1 / 8, micro_step=1 / 64, decode=1 / 16 / DECODE_MARGIN)
        asks = view(running=[9.0], jobs=("j",))
        for due, decision in [
            (Due(1.0, 1, 13), Train("j", 3)),
            (Due(1.0, 1, 14), Serve(0)),
            (Due(1.0, 1, 0), Train("j", 3)),
        ]:
            seen = replace(asks, running=(*asks.running, due), costs=costs, train_waiting_since=0.0)
            assert self.policy.decide(seen, 0.0) == decision
        for decodes, decision in [(13, Train("j", 3)), (14, Serve(1))]:
            waits = Request(0.0, 9.0, end=1.0, decodes=decodes)
            seen = replace(asks, waiting=(waits,), queued=1, first_arrival=0.0, costs=costs)
            assert self.policy.decide(seen, 0.0) == decision

    def test_more_than_the_mean_is_planned_for_decodes_to_the_last_token(self) -> None:
        """Thirteen of 1/16 s and a step of 1/8 s would leave 1/16 s for training."""
        costs = Costs(serve=1 / 8, micro_step=1 / 64, decode=1 / 16)
        seen = view(running=[9.0], jobs=("j",))
        for decodes, decision in [(0, Train("j", 3)), (13, Serve(0))]:
            asks = replace(seen, running=(Due(1.0, 1, decodes),), costs=costs)
            assert self.policy.decide(asks, 0.0) == decision

    def test_a_margin_for_slower_steps_takes_no_more_than_a_quarter_of_a_tokens_time(self) -> None:
        """A step of 1/8 s as expected, 3/4 s at most, whose token is due within 1 s."""
        costs = Costs(serve=3 / 4, micro_step=1 / 64, serve_expected=1 / 8)
        seen = replace(view(running=[1.0], jobs=("j",)), costs=costs)
        for window, decision in [(4.0, Serve(0)), (1.0, Train("j", 3))]:
            due = replace(seen, running=(Due(1.0, window=window),))
            assert self.policy.decide(due, 0.5) == decision
        assert self.policy.decide(replace(seen, running=(Due(1.0, window=1.0),)), 5 / 8) == Serve(0), "that quarter"

    def test_a_margin_for_slower_micro_steps_takes_no_more_than_a_quarter_of_a_tokens_time(self) -> None:
        """Of 5 ms as expected, 9 s at most. The slack is 44 ms, then 24 ms."""
        costs = Costs(serve=1 / 8, micro_step=9.0, micro_step_expected=0.005)
        seen = replace(view(running=[1.0], jobs=("j",)), costs=costs)
        for window, now, decision in [(0.1, 0.83, Train("j", 3)), (0.1, 0.85, Serve(0)), (0.2, 0.83, Serve(0))]:
            due = replace(seen, running=(Due(1.0, window=window), Due(9.0, window=9.0)))
            assert self.policy.decide(due, now) == decision
        exact = replace(seen, running=(Due(1.0, window=0.1),), costs=replace(costs, micro_step=0.006))
        assert self.policy.decide(exact, 0.83) == Train("j", 7), "without that margin"

    def test_several_micro_steps_where_they_fit_but_no_slice_longer_than_the_longest(self) -> None:
        seen = view([], [9.0], jobs=("j",), micro_step=MAX_SLICE / 8, train_waiting_since=0.0)
        assert self.policy.decide(seen, 0.0) == Train("j", 8)

    def test_a_full_batch_for_which_others_wait_is_served_at_full_speed(self) -> None:
        """At the pace of its deadlines it would serve fewer requests than arrive."""
        calm = view([], [9.0] * 4, jobs=("j",), headroom=0, micro_step=0.04)
        assert self.policy.decide(calm, 0.0) == Train("j", 1)
        assert self.policy.decide(view([0.0], [9.0] * 4, jobs=("j",), headroom=0, micro_step=0.04), 0.0) == Serve(0)

    def test_a_first_token_waits_for_the_batchs_next_step_but_not_for_long(self) -> None:
        """However late its deadline is, and however late the batch's next step."""
        seen = view([10.0], [99.0], jobs=("j",), micro_step=0.01, ttft=20.0)
        assert self.policy.decide(seen, 10.018) == Train("j", 3)
        assert self.policy.decide(seen, 10.045) == Serve(1)

    def test_a_first_token_that_is_due_soon_does_not_wait(self) -> None:
        seen = view([10.0], [99.0], jobs=("j",), serve=0.1, micro_step=0.009, ttft=0.12)
        assert self.policy.decide(seen, 10.0) == Train("j", 2)
        assert self.policy.decide(seen, 10.015) == Serve(1)

    def test_patience_gives_one_micro_step_whatever_the_deadlines_say(self) -> None:
        pressed = view([0.0] * 9, [0.0], headroom=3, jobs=("j",), serve=0.1, micro_step=0.5, train_waiting_since=10.0)
        assert self.policy.decide(pressed, 10.9) == Serve(3)
        decision = self.policy.decide(pressed, 11.0)
        assert decision == Train("j", 1, Overdue(micro_step=0.5, slack=0.0)), "a full batch has none"

    def test_without_patience_slices_that_do_not_fit_and_steps_take_turns(self) -> None:
        late = view([], [0.0], jobs=("j",), serve=0.1, micro_step=0.5, train_waiting_since=10.0)
        for floor in (0.0, 0.5):
            policy = Slack(patience=0.0, floor=floor)
            assert isinstance(policy.decide(late, 10.5), Train)
            assert policy.decide(replace(late, in_flight=InFlight(since_step=True)), 20.0) == Serve(0)


def test_settings_choose_the_policy() -> None:
    assert isinstance(make_policy(Config(policy="ets")), Ets)
    assert isinstance(make_policy(Config(policy="slack")), Slack)
    assert isinstance(make_policy(Config(policy="inference-first")), InferenceFirst)
    under_way = view([0.0] * 64, jobs=("j",), alternation=Alternation("j"))
    for settings, decision in [({}, Train("j", None)), ({"ts_unit": "batch"}, Serve(64))]:
        policy = make_policy(Config(policy="ts", **settings))
        assert isinstance(policy, TemporalSharing) and policy.decide(under_way, 9.0) == decision


def test_a_batch_of_the_papers_policies_has_its_own_size() -> None:
    """One batch runs to its end: with more places, another would begin while its adapters are read."""
    assert Config().batch_requests == Config().max_running > Config().inference_batch_size
    for policy in ("ets", "ts"):
        assert Config(policy=policy).batch_requests == Config().inference_batch_size
        few = Config(policy=policy, max_running=8)
        assert make_policy(few).decide(view([0.0] * 8), 0.0) == Serve(few.batch_requests) == Serve(8)


@pytest.mark.parametrize(
    ("device", "tp", "policy"), [("cuda", 1, "overlap"), ("cuda", 2, "slack"), ("cpu", 1, "slack")]
)
def test_auto_is_overlap_on_one_gpu(device: str, tp: int, policy: str) -> None:
    assert Config(policy="auto", tp=tp).resolved(device=device) == Config(policy=policy, tp=tp)
    assert Config(policy="ets").resolved(device=device).policy == "ets"


def test_adapters_take_turns_in_the_queue_but_under_the_papers_policies() -> None:
    assert [Config(policy=name).fair for name in ("slack", "inference-first", "ets", "ts")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("name", ["slack", "overlap"])
def test_the_rest_of_a_prompt_waits_no_longer_than_a_prompt(name: str) -> None:
    """Its first token is due in five seconds; a part of the prompt was computed in a step of its own."""
    policy = make_policy(Config(policy=name, train_floor=0.0))
    seen = view([], [], jobs=("j",), micro_step=0.01, train_waiting_since=0.0)
    for first, decision in ((False, Train), (True, Serve)):
        due = Due(5.0, 2, 0, 5.0, first=first)
        assert isinstance(policy.decide(replace(seen, running=(due,)), 0.2), decision)


def test_the_weight_of_training_is_a_share() -> None:
    seen = view([], [1.0], jobs=("j",), micro_step=0.01, train_waiting_since=0.0)
    seen = replace(seen, running=(Due(1.0, window=1.0),))
    for weight, decision in [(0.0, Serve(0)), (0.5, Serve(0)), (0.7, Train("j", 5))]:
        policy = make_policy(Config(train_weight=weight, train_patience=9.0, train_floor=0.0))
        assert policy.decide(seen, 0.5) == decision
    with pytest.raises(ConfigError, match="train_weight"):
        Config(train_weight=1.5)


@pytest.mark.parametrize("name", ["slack", "overlap"])
def test_training_has_a_floor(name: str) -> None:
    """Late tokens stop it for nineteen times a micro-step, not for its patience."""
    policy = make_policy(Config(policy=name, train_patience=9.0, train_floor=0.05))
    late = view([], [0.0], jobs=("j",), micro_step=0.01, train_waiting_since=0.0)
    assert policy.decide(late, 0.18) == Serve(0, between=name == "overlap")
    assert policy.decide(late, 0.2) == Train("j", 1, Overdue(0.01, pytest.approx(-0.2, abs=2 * TIMER)))
    unknown = view([], [0.0], jobs=("j",), train_waiting_since=0.0)
    assert policy.decide(unknown, 1.0) == Serve(0, between=name == "overlap"), "the time of a micro-step is not known"
    with pytest.raises(ConfigError, match="train_floor"):
        Config(train_floor=0.6)


class TestSpatial:
    policy = Spatial()

    def decide(self, seen: View, slices: int, *, since_step: bool = False) -> Decision:
        return self.policy.decide(replace(seen, in_flight=InFlight(slices, since_step)), 0.0)

    def test_slices_and_steps_are_launched_in_turn_until_two_slices_are_in_flight(self) -> None:
        seen = view(running=[1.0], jobs=("j",), micro_step=MIN_SLICE)
        assert self.decide(seen, 0) == self.decide(seen, 1) == Train("j", 1)
        assert self.decide(seen, 1, since_step=True) == self.decide(seen, 2) == Serve(0)

    def test_without_requests_it_waits_for_the_end_of_a_slice(self) -> None:
        seen = view(jobs=("j",), micro_step=MIN_SLICE)
        assert self.decide(seen, 1, since_step=True) == Train("j", 1)
        assert self.decide(seen, 2, since_step=True) == self.decide(view(), 2) == Wait(None)

    def test_a_slice_is_as_long_as_a_step_within_limits(self) -> None:
        for step, seconds in ((0.0, MIN_SLICE), (0.02, 0.02), (1.0, MAX_SLICE)):
            decision = self.decide(view([0.0], jobs=("j",), serve=step, micro_step=0.004), 0)
            assert isinstance(decision, Train) and decision.micro_steps is not None
            assert 0.004 * decision.micro_steps <= seconds < 0.004 * (decision.micro_steps + 1)


class TestOverlap:
    policy = Overlap(patience=1.0)

    @staticmethod
    def seen(
        due: float,
        *,
        window: float = 0.05,
        slices: int = 0,
        until: float = 0.0,
        overlapped: float = 0.012,
        beside: float = 0.8,
        jobs: bool = True,
    ) -> View:
        """A request runs whose token is due; a step alone takes 6 ms, a micro-step 4 ms."""
        costs = Costs(
            serve=0.006,
            micro_step=0.004,
            decode=0.005,
            overlapped=overlapped,
            serve_expected=0.006,
            overlapped_expected=overlapped,
            train_overlap_speed=beside,
        )
        found = view(jobs=("j",) if jobs else (), train_waiting_since=0.0)
        flight = InFlight(slices, until=until)
        return replace(found, running=(Due(due, window=window),), costs=costs, in_flight=flight)

    def test_two_slices_are_launched_ahead_and_a_step_begins_when_its_token_is_due(self) -> None:
        begin = 1.0 - 0.012 - TIMER
        for slices in (0, 1):
            assert self.policy.decide(self.seen(1.0, slices=slices), 0.9) == Train("j", 3), "as long as a step"
        assert self.policy.decide(self.seen(1.0, slices=2), 0.9) == Wait(pytest.approx(begin))
        assert self.policy.decide(self.seen(1.0, slices=2), begin + 1e-9) == Serve(0)

    def test_a_step_begins_early_only_where_the_device_would_be_idle(self) -> None:
        now = 1.0 - 0.012 - TIMER - 0.003  # no micro-step fits
        assert self.policy.decide(self.seen(1.0), now) == Serve(0)
        assert isinstance(self.policy.decide(self.seen(1.0, slices=1), now), Wait)

    def test_where_the_target_is_too_short_for_a_step_beside_training_they_take_turns(self) -> None:
        alone = 1.0 - 0.006 - TIMER
        for policy, window in ((self.policy, 0.014), (Overlap(1.0, overlapped=False), 0.05)):
            assert policy.decide(self.seen(1.0, window=window), alone - 0.005) == Train("j", 1)
            busy = self.seen(1.0, window=window, slices=1, until=alone - 0.002)
            assert policy.decide(busy, 0.98) == Wait(pytest.approx(alone - 0.002 - AHEAD)), "another one ends too late"
            assert policy.decide(busy, alone - 0.002 - AHEAD + 1e-9) == Serve(0, between=True)

    def test_a_step_that_costs_training_more_beside_it_takes_its_turn(self) -> None:
        """It takes 12 ms beside training and 6 alone."""
        late = 1.0 - 0.006
        assert self.policy.decide(self.seen(1.0, slices=1, beside=0.51), late) == Serve(0)
        assert self.policy.decide(self.seen(1.0, slices=1, beside=0.49), late) == Serve(0, between=True)
        unknown = self.seen(1.0, slices=1)
        unknown = replace(unknown, costs=replace(unknown.costs, serve_expected=math.inf))
        assert self.policy.decide(unknown, late) == Serve(0, between=True), "none has been measured"

    def with_prompt(self, due: float, arrived: float, *, mean: float, slices: int, until: float = 0.0) -> View:
        """A request waits, too: a step with its prompt takes 20 ms alone, 30 beside training at most, `mean` as
        expected."""
        found = self.seen(due, slices=slices, until=until)
        costs = replace(
            found.costs, serve=0.02, overlapped=0.03, overlapped_expected=mean, admitting_nobody=found.costs
        )
        return replace(found, waiting=(Request(arrived, 9.0),), queued=1, costs=costs)

    def test_a_step_without_prompts_comes_first_where_one_with_them_cannot_run_beside_training(self) -> None:
        begin, mean = 1.0 - 0.012 - TIMER, 0.048
        assert self.policy.decide(self.with_prompt(1.0, begin, mean=mean, slices=2), begin + 1e-9) == Serve(0)
        assert self.policy.decide(self.with_prompt(1.0, begin, mean=0.03, slices=2), begin + 1e-9) == Serve(1), "it can"

    def test_prompts_are_not_held_back_for_long(self) -> None:
        """A step with them takes its turn when the next tokens are due."""
        alone = 1.0 - 0.02 - TIMER
        long_ago = self.with_prompt(1.0, 0.9, mean=0.048, slices=1, until=alone - 0.001)
        assert self.policy.decide(long_ago, alone - 0.001 - AHEAD + 1e-9) == Serve(1, between=True)
        assert self.policy.decide(long_ago, 0.95) == Wait(pytest.approx(alone - 0.001 - AHEAD))

    @pytest.mark.parametrize(
        ("weight", "waits", "held"), [(1.0, 0.045, True), (1.0, 0.055, False), (0.5, 0.02, True), (0.5, 0.03, False)]
    )
    def test_a_step_without_prompts_comes_first_while_they_have_not_waited_long(
        self, weight: float, waits: float, held: bool
    ) -> None:
        """They wait on while it is computed. Less weight of training, shorter waits."""
        now = 1.0 - 0.05 * (1 - weight) - 0.012
        decision = Overlap(1.0, weight=weight).decide(self.with_prompt(1.0, now - waits, mean=0.048, slices=2), now)
        assert (decision == Serve(0)) == held

    def test_in_turns_prompts_wait_for_the_batchs_next_tokens(self) -> None:
        """A step for them takes time from training. For a batch that is empty they do not wait so long."""
        policy = Overlap(1.0, overlapped=False)
        joins = self.with_prompt(9.0, 0.5, mean=0.03, slices=0)
        assert isinstance(policy.decide(joins, 0.6), Train)
        assert policy.decide(joins, 0.62) == Serve(1, between=True)
        alone = replace(joins, running=())
        assert isinstance(policy.decide(alone, 0.54), Train)
        assert policy.decide(alone, 0.55) == Serve(1, between=True)

    def test_a_step_after_slices_is_launched_before_they_end(self) -> None:
        """The device would be idle until the launch arrives."""
        policy, busy = Overlap(1.0, overlapped=False), self.seen(1.0, slices=1, until=0.99)
        assert isinstance(policy.decide(busy, 0.98), Wait)
        assert policy.decide(busy, 0.988) == Serve(0, between=True)

    @pytest.mark.parametrize(("step", "micro_steps"), [(0.001, 2), (0.012, 6), (0.3, 12)])
    def test_in_turns_a_slice_is_as_long_as_a_step_beside_training_within_limits(
        self, step: float, micro_steps: int
    ) -> None:
        found = self.seen(9.0, overlapped=step)
        found = replace(found, costs=replace(found.costs, micro_step=0.00199))
        assert Overlap(1.0, overlapped=False).decide(found, 0.9) == Train("j", micro_steps)

    def test_while_the_next_micro_step_needs_results_steps_are_paced_on(self) -> None:
        assert isinstance(self.policy.decide(self.seen(1.0, slices=1, jobs=False), 0.9), Wait)
        assert self.policy.decide(self.seen(1.0, jobs=False), 0.9) == Serve(0), "nothing trains"

    def test_a_job_without_slices_in_flight_waits_no_longer_than_its_patience(self) -> None:
        late = self.seen(0.5)
        assert self.policy.decide(late, 0.6) == Serve(0)
        assert self.policy.decide(late, 1.0) == Train("j", 1, Overdue(0.004, pytest.approx(-0.513)))
        assert self.policy.decide(self.seen(0.5, slices=1), 1.0) == Serve(0)

    def test_a_full_batch_is_served_at_full_speed(self) -> None:
        assert self.policy.decide(replace(self.seen(9.0), queued=1), 0.5) == Serve(0)

    def test_without_requests_slices_follow_one_another(self) -> None:
        idle = replace(view(jobs=("j",)), costs=Costs(0.0, 0.004))
        assert self.policy.decide(idle, 0.0) == Train("j", int(LONGEST / 0.004))
        assert self.policy.decide(replace(idle, in_flight=InFlight(2)), 0.0) == Wait(None)
