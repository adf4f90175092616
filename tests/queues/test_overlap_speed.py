"""What is learned of training beside generation steps."""

from __future__ import annotations

import random

import pytest

from coserve.core.training.micro_step import MicroStep
from coserve.queues.policy import Train
from coserve.queues.slices import (
    ENOUGH,
    FIRST_GUESS,
    TRIAL_AFTER,
    TRIALS,
    WINDOW,
    EndedSlice,
    OverlapSpeed,
    Slices,
    Trials,
)


@pytest.mark.parametrize("speed", [0.0, 0.5, 0.8, 1.0])
def test_the_speed_of_training_beside_steps(speed: float) -> None:
    """Slices of 10 ms alone, of which 4 ms are computed beside a step."""
    found = OverlapSpeed()
    beside = 0.004 / speed if speed else 0.004
    seconds = 0.006 + beside if speed else 0.014
    for _ in range(ENOUGH - 1):
        found.add(seconds, beside, 0.01)
    assert found.share == FIRST_GUESS, "too few"
    found.add(seconds, beside, 0.01)
    assert found.share == pytest.approx(speed)


@pytest.mark.parametrize("speed", [0.0, 1.0])
def test_errors_of_short_overlaps_cancel_out(speed: float) -> None:
    found, rng = OverlapSpeed(), random.Random(0)
    for _ in range(10 * WINDOW):
        beside, alone = 0.001, 0.01 * rng.gauss(1.0, 0.03)
        found.add(alone + beside * (1 - speed), beside, 0.01)
    assert found.share == pytest.approx(speed, abs=0.1)


def test_slices_of_another_time_are_forgotten() -> None:
    """Training kept all of its speed beside steps, later half of it."""
    found = OverlapSpeed()
    for seconds in [1.0] * WINDOW + [1.5] * WINDOW:
        found.add(seconds, 1.0, 1.0)
    assert found.share == 0.5


def test_slices_without_steps_say_nothing_of_it() -> None:
    found = OverlapSpeed()
    for _ in range(2 * ENOUGH):
        found.add(0.01, 0.0, 0.01)
    assert found.share == FIRST_GUESS


def test_it_is_learned_from_slices_against_those_that_ran_alone() -> None:
    slices = Slices()
    for _ in range(2 * ENOUGH):
        slices.ran(EndedSlice(Train("j", 2), MicroStep.BACKWARD, 2, 4096, 0.016, at=0.0))
        slices.ran(EndedSlice(Train("j", 1), MicroStep.BACKWARD, 1, 4096, 0.012, 0.0, 0.01, "decode"))
        slices.ran(EndedSlice(Train("j", 1), MicroStep.BACKWARD, 1, 4096, 0.013, 0.0, 0.01, "prefill"))
        slices.ran(EndedSlice(Train("j", 1), MicroStep.BACKWARD, 1, 4096, 0.9, 0.0, 0.01, None))
        slices.ran(EndedSlice(Train("other", 1), MicroStep.BACKWARD, 1, 4096, 0.9, 0.0, 0.01, "decode"))
    assert slices.overlap_speed["decode"].share == pytest.approx(0.6, abs=0.01), "not of a job never measured alone"
    assert slices.overlap_speed["prefill"].share == pytest.approx(0.5, abs=0.01)


def test_what_a_job_takes_alone_is_known_after_it_was_not_ready_for_a_while() -> None:
    """Its next step was prepared on a thread."""
    slices = Slices()
    for _ in range(2 * ENOUGH):
        slices.ready(("j",), 0.0)
        slices.ran(EndedSlice(Train("j", 1), MicroStep.BACKWARD, 1, 4096, 0.008, at=0.0))
    for _ in range(ENOUGH):
        slices.ready((), 0.0)
        slices.ready(("j",), 0.0)
        slices.ran(EndedSlice(Train("j", 1), MicroStep.BACKWARD, 1, 4096, 0.012, 0.0, 0.01, "decode"))
    assert slices.overlap_speed["decode"].share == pytest.approx(0.6, abs=0.01)


def test_steps_of_a_kind_are_measured_in_turn_again() -> None:
    trials = Trials()
    for _ in range(TRIAL_AFTER - 1):
        trials.ran("decode", overlapped=True)
    assert not trials.due("decode")
    trials.ran("prefill", overlapped=False)
    trials.ran("decode", overlapped=True)
    assert trials.due("decode") and not trials.due("prefill")
    for _ in range(TRIALS):
        assert trials.due("decode")
        trials.ran("decode", overlapped=False)
    assert not trials.due("decode")


def test_a_step_in_turn_measures_what_one_takes_whatever_made_it_take_its_turn() -> None:
    trials = Trials()
    for _ in range(2):
        for _ in range(TRIAL_AFTER - 1):
            trials.ran("decode", overlapped=True)
        assert not trials.due("decode")
        trials.ran("decode", overlapped=False)
