"""The time left is taken from a job's own steps by the wall clock; breaks and repeated steps are not speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.core.training.jobs import JobState
from coserve.state.registry.records import WINDOW, Pace
from coserve.state.registry.registry import Registry
from tests.support.records import make_job, make_metrics


def told(*steps: float, start: float = 0.0) -> Pace:
    pace = Pace(start)
    for at in steps:
        pace = pace.step(at)
    return pace


def test_nothing_is_known_before_the_first_step() -> None:
    assert told().left(5) is None
    assert told(3).left(5) == 15
    assert told(3).left(0) == 0


def test_the_first_step_counts_until_the_second() -> None:
    assert told(60, 61, 62, start=0).left(10) == 10


def test_the_pace_is_that_of_the_last_steps() -> None:
    slow = [10.0 * i for i in range(1, 20)]
    fast = [slow[-1] + i for i in range(1, 5 * WINDOW)]
    assert told(*slow, *fast).left(1) == pytest.approx(1, abs=0.1)


def test_a_clock_that_is_set_back_gives_no_negative_time() -> None:
    assert told(100, 50, 51).left(10) == 5


def test_a_job_that_pauses_or_repeats_steps_after_a_crash_keeps_its_pace(tmp_path: Path) -> None:
    clock = [0.0]
    registry = Registry(tmp_path / "registry.sqlite", clock=lambda: clock[0])
    registry.create_job(make_job())

    def at(now: float) -> None:
        clock[0] = now

    def etas() -> list[float]:
        return [event.eta for event in registry.events("job-1") if event.metrics is not None and event.eta is not None]

    registry.record_start("job-1", 12, 0)
    for step in range(1, 7):
        at(2.0 * step)
        registry.record_step("job-1", make_metrics(step, 12))
    assert etas() == pytest.approx([22, 20, 18, 16, 14, 12])
    at(13.0)
    registry.set_state("job-1", JobState.PAUSED)
    at(9000.0)
    registry.set_state("job-1", JobState.QUEUED)
    registry.record_start("job-1", 12, 4)
    at(9002.0)
    registry.record_step("job-1", make_metrics(5, 12))
    assert etas()[-1] == pytest.approx(14)
    assert [event.eta for event in registry.events("job-1") if event.metrics is None] == [None] * 5
