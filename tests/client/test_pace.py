"""The time left is taken from steps as the daemon noted them; breaks and repeated steps are not speed."""

from __future__ import annotations

import pytest

from coserve.client.pace import WINDOW, Pace
from coserve.schemas import JobEvent
from coserve.types import JobState, StepMetrics


def step(number: int, at: float, total: int = 100) -> JobEvent:
    metrics = StepMetrics(
        step=number, total_steps=total, epoch=1.0, loss=1.0, learning_rate=1.0, grad_norm=1.0, tokens=10,
        target_tokens=5, seconds=0.1,
    )  # fmt: skip
    return JobEvent(seq=number, job="j", created_at=at, level="info", type="metrics", message="", metrics=metrics)


def state(name: JobState, at: float) -> JobEvent:
    return JobEvent(seq=1, job="j", created_at=at, level="info", type="state", message="", state=name)


def told(*events: JobEvent) -> float | None:
    pace = Pace()
    for event in events:
        pace.add(event)
    return pace.left


def test_nothing_is_known_before_two_steps() -> None:
    assert told() is None
    assert told(state(JobState.RUNNING, 0), step(1, 5)) is None


def test_a_story_told_all_at_once_has_its_own_times() -> None:
    assert told(state(JobState.RUNNING, 0), *(step(i, 2.0 * i) for i in range(1, 51))) == pytest.approx(100)


def test_a_pause_is_no_slow_step() -> None:
    before = [step(i, 2.0 * i) for i in range(1, 11)]
    broken = [state(JobState.PAUSED, 21), state(JobState.QUEUED, 9000), state(JobState.RUNNING, 9001)]
    assert told(*before, *broken) is None
    assert told(*before, *broken, step(11, 9002), step(12, 9003)) == pytest.approx(88)


def test_steps_repeated_after_a_crash_are_no_speed() -> None:
    before = [step(i, 2.0 * i) for i in range(1, 31)]
    assert told(*before, step(21, 100), step(22, 104)) == pytest.approx(4 * 78)


def test_the_pace_is_that_of_the_last_steps() -> None:
    slow = [step(i, 10.0 * i) for i in range(1, 20)]
    fast = [step(20 + i, 200.0 + i) for i in range(WINDOW + 1)]
    assert told(*slow, *fast) == pytest.approx(60)
