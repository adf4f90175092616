"""What is remembered of slices: their costs by job and kind, and since when training has run by patience alone."""

from __future__ import annotations

import pytest

from coserve.core.link.stats import Starving
from coserve.core.training.micro_step import MicroStep
from coserve.queues.policy import Overdue, Train
from coserve.queues.slices import MOST_KINDS, EndedSlice, Slices

LATE = Train("j", 1, Overdue(micro_step=0.21, slack=0.15))


def run(slices: Slices, job: str, kind: MicroStep, seconds: float, micro_steps: int = 1, tokens: int = 64) -> None:
    slices.ran(EndedSlice(Train(job, micro_steps), kind, micro_steps, tokens, seconds, at=0.0))


def expected(slices: Slices, job: str, kind: MicroStep, tokens: int = 64) -> float:
    return round(slices.predict(job, kind, tokens).expected, 9)


def test_micro_steps_of_other_sizes_are_predicted_from_their_tokens() -> None:
    slices = Slices()
    for tokens in (1000, 2000, 4000, 3000) * 10:
        run(slices, "j", MicroStep.FORWARD, 0.001 + 1e-6 * tokens, tokens=tokens)
    for job in ("j", "k"):
        assert abs(expected(slices, job, MicroStep.FORWARD, 500) - 0.0015) < 1e-4


def test_tokens_whose_micro_steps_take_no_longer() -> None:
    slices = Slices()
    assert slices.tokens_within(None) is slices.tokens_within(0.1) is None, "nothing is known"
    for tokens in (500, 1000, 2000) * 20:
        run(slices, "j", MicroStep.FORWARD, 1e-4 * tokens, tokens=tokens)
        run(slices, "j", MicroStep.HEAD, 9.0, tokens=tokens)
    within = slices.tokens_within(0.1)
    assert within is not None and 600 < within < 1000, "the time of the head is that of a chunk; errors are expected"
    run(slices, "j", MicroStep.BACKWARD, 0.3, tokens=1000)
    run(slices, "j", MicroStep.BACKWARD, 0.3, tokens=1000)
    assert slices.tokens_within(0.2) == 0, "where one size is known, it fits or nothing does"
    assert slices.tokens_within(0.4) == pytest.approx(4 * within, rel=0.05)


def test_costs_are_those_of_one_micro_step_of_one_job_and_kind() -> None:
    slices = Slices()
    slices.ready(("j", "k"), 0.0)
    for _ in range(2):
        run(slices, "j", MicroStep.FORWARD, 0.4, micro_steps=4)
        run(slices, "j", MicroStep.HEAD, 0.3)
        run(slices, "k", MicroStep.FORWARD, 0.8)
    assert expected(slices, "j", MicroStep.FORWARD) == 0.1
    assert expected(slices, "j", MicroStep.HEAD) == 0.3
    assert expected(slices, "j", MicroStep.BACKWARD) in (0.1, 0.3, 0.8), (
        "a kind without samples begins with the others'"
    )
    assert expected(slices, "k", MicroStep.HEAD) == 0.3, "a job without samples begins with the others'"
    slices.ready(("j",), 0.0)
    slices.ready(("j", "k"), 0.0)
    assert expected(slices, "k", MicroStep.FORWARD) == 0.8, "its next step was prepared meanwhile"
    for other in range(MOST_KINDS):
        run(slices, f"other-{other}", MicroStep.FORWARD, 0.2)
        if other < MOST_KINDS - 9:
            run(slices, "j", MicroStep.FORWARD, 0.1)
    assert expected(slices, "j", MicroStep.FORWARD) == 0.1, "whatever trained meanwhile"
    assert expected(slices, "k", MicroStep.FORWARD) != 0.8, "of many, those that trained longest ago are forgotten"


def test_whole_micro_batches_teach_nothing() -> None:
    slices = Slices()
    for _ in range(3):
        slices.ran(EndedSlice(Train("j", None), MicroStep.BEGIN, 20, 64, 9.0, at=0.0))
    assert expected(slices, "j", MicroStep.BEGIN) == 0.0


def test_two_slices_by_patience_are_a_famine_until_one_fits() -> None:
    slices = Slices()
    slices.ready(("j",), 10.0)
    slices.ran(EndedSlice(LATE, MicroStep.HEAD, 1, 64, 0.2, at=11.2))
    assert slices.starving(11.2) is None
    slices.ran(EndedSlice(LATE, MicroStep.HEAD, 1, 64, 0.2, at=12.4))
    assert slices.starving(13.0) == Starving(seconds=3.0, micro_step=0.21, slack=0.15)
    assert slices.by_patience == 2
    slices.ran(EndedSlice(Train("j", 1), MicroStep.HEAD, 1, 64, 0.1, at=13.0))
    assert slices.starving(13.0) is None
    assert slices.by_patience == 2


def test_without_jobs_nobody_starves() -> None:
    slices = Slices()
    slices.ready(("j",), 0.0)
    for now in (1.0, 2.0):
        slices.ran(EndedSlice(LATE, MicroStep.HEAD, 1, 64, 0.2, at=now))
    slices.ready((), 3.0)
    assert slices.starving(3.0) is None
    assert slices.waiting_since is None
