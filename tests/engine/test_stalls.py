"""Stalls: the time between two moments at which a generation step can begin, by cause."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.link.stats import STALL_BUCKETS, StallCounts
from coserve.engine.stalls import LOOP, SLEEP, Stalls


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def spend(stalls: Stalls, clock: Clock, cause: str, seconds: float) -> None:
    with stalls.during(cause):
        clock.now += seconds


def found(stalls: Stalls) -> dict[str, StallCounts]:
    return {counts.cause: counts for counts in stalls.totals()}


def test_a_stall_is_filed_under_the_cause_that_took_most_of_it() -> None:
    stalls = Stalls(clock := Clock())
    stalls.step_can_begin(has_requests=True)
    spend(stalls, clock, "decode", 0.01)
    spend(stalls, clock, "messages", 0.03)
    clock.now += 0.02
    stalls.step_can_begin(has_requests=True)
    (only,) = stalls.totals()
    assert only.cause == "messages"
    assert only.seconds == pytest.approx(0.06)
    assert sum(only.buckets) == only.buckets[STALL_BUCKETS.index(0.1)] == 1


@pytest.mark.parametrize(("before", "after", "counts"), [(False, False, 0), (True, False, 1), (False, True, 1)])
def test_it_counts_while_somebody_is_there(before: bool, after: bool, counts: int) -> None:
    stalls = Stalls(clock := Clock())
    stalls.step_can_begin(has_requests=before)
    spend(stalls, clock, "train_forward", 0.01)
    stalls.step_can_begin(has_requests=after)
    assert len(stalls.totals()) == counts


def test_sleep_is_no_stall_but_what_wakes_it_up_is() -> None:
    stalls = Stalls(clock := Clock())
    stalls.step_can_begin(has_requests=False)
    with stalls.during(SLEEP):
        clock.now += 1000
        spend(stalls, clock, "messages", 0.5)
    stalls.step_can_begin(has_requests=True)
    assert found(stalls)["messages"].seconds == pytest.approx(0.5)


def test_long_ones_are_logged_with_their_parts(caplog: pytest.LogCaptureFixture) -> None:
    stalls = Stalls(clock := Clock())
    stalls.step_can_begin(has_requests=True)
    for seconds in (0.09, 0.12, 0.2):
        spend(stalls, clock, "jobs", seconds)
        spend(stalls, clock, "decode", 0.001)
        stalls.step_can_begin(has_requests=True)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "a generation step was held up by jobs, 121 ms: jobs 120 ms, decode 1 ms"
    ]


CAUSES = ("decode", "train_begin", "messages", SLEEP)


class _Life:
    """Opens and closes sections at random, and computes the expected counts."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.stalls = Stalls(self.clock)
        self.stalls.step_can_begin(has_requests=True)
        self.awake = 0.0

    def run(self, draw: st.DataObject, depth: int) -> None:
        for _ in range(draw.draw(st.integers(0, 3))):
            cause = draw.draw(st.sampled_from(CAUSES))
            with self.stalls.during(cause):
                seconds = draw.draw(st.integers(0, 1 << 20)) / (1 << 16)  # dyadic: sums are exact
                self.clock.now += seconds
                self.awake += seconds * (cause != SLEEP)
                if depth:
                    self.run(draw, depth - 1)


@given(st.data())
def test_no_second_is_lost_and_none_counts_twice(data: st.DataObject) -> None:
    life = _Life()
    for _ in range(data.draw(st.integers(1, 4))):
        life.run(data, 2)
        life.stalls.step_can_begin(has_requests=True)
    totals = life.stalls.totals()
    assert sum(counts.seconds for counts in totals) == life.awake
    assert SLEEP not in {counts.cause for counts in totals}
    assert {counts.cause for counts in totals} <= {*CAUSES, LOOP}
