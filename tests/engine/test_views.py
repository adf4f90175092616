"""What steps are expected to take, alone and beside training, from those that were measured."""

from __future__ import annotations

import pytest

from coserve.core.link.generation import Tokens
from coserve.core.training.micro_step import MicroStep
from coserve.core.types import Slo
from coserve.engine.views import FORGET, Views
from coserve.generate.schedule import Scheduler
from coserve.queues.costs import FIRST_GUESS as FIRST_MARGIN
from coserve.queues.policy import Costs
from coserve.queues.request import Request
from coserve.queues.shapes import STEP_KINDS, StepKind
from coserve.queues.slices import ENOUGH, FIRST_GUESS, TRIAL_AFTER, TRIALS
from tests.support.pages import BareAdapters, BarePages, next_scheduled
from tests.support.records import make_request

ALONE, BESIDE = 0.01, 0.02
"""Seconds of a step."""


class OneJob:
    """Whether it can train is set."""

    def __init__(self) -> None:
        self.can_train = True

    def ready(self) -> tuple[str, ...]:
        return ("j",) if self.can_train else ()

    def next_micro_step(self, job: str) -> MicroStep:
        return MicroStep.FORWARD

    def micro_batch_tokens(self, job: str) -> int:
        return 4096

    def in_training(self, job: str) -> bool:
        return True


class Steps:
    """Of one running request: the next one computes its prompt (prefill), or its next token (decode)."""

    def __init__(self, kind: StepKind) -> None:
        self.jobs = OneJob()
        self.scheduler = Scheduler(BarePages(99, 16), BareAdapters(), max_running=8, step_tokens=64)
        message = make_request(max_tokens=99, prompt=10, slo=Slo(ttft=1.0, tpot=0.05))
        self.scheduler.add(request := Request(message))
        if kind == "decode":
            next_scheduled(self.scheduler)
            request.computed = 10
            request.push(1)
            self.scheduler.tokens_came([Tokens(id="r", tokens=(1,), finished=None)], 0.0)
        self.views = Views(self.jobs)
        self._shape = self.scheduler.propose().admitting_nobody
        assert self._shape.kind == kind

    def took(self, seconds: float, times: int = 1, *, beside: bool = False, alone: bool = True) -> None:
        """`alone`: launched with no other step in flight."""
        shape = self._shape._replace(alone=int(alone))
        for _ in range(times):
            self.views.step_took(shape, seconds, overlapped=beside)

    def beside(self) -> None:
        """A few steps beside training, which then has half of its speed."""
        self.took(BESIDE, 5, beside=True)
        for _ in range(ENOUGH):
            self.views.slices.overlap_speed[self._shape.kind].add(1.5, 1.0, 1.0)

    @property
    def costs(self) -> Costs:
        return self.views.view(self.scheduler.propose(), 0.0).costs


@pytest.mark.parametrize("kind", STEP_KINDS)
def test_what_a_step_takes_beside_training_is_forgotten_after_many_without_it(kind: StepKind) -> None:
    steps, (_, forget) = Steps(kind), FORGET[kind]
    for _ in range(2):
        steps.beside()
        steps.took(ALONE, forget - 1)
        assert steps.costs.overlapped_expected == pytest.approx(BESIDE)
        assert steps.costs.train_overlap_speed == pytest.approx(0.5)
        steps.took(ALONE)
        assert steps.costs.overlapped_expected == pytest.approx(ALONE), "so that it is tried again"
        assert steps.costs.train_overlap_speed == FIRST_GUESS


@pytest.mark.parametrize("kind", STEP_KINDS)
def test_errors_of_times_beside_training_are_forgotten_before_the_times(kind: StepKind) -> None:
    steps, (forget_errors, _) = Steps(kind), FORGET[kind]
    for _ in range(20):
        steps.took(BESIDE, 4, beside=True)
        steps.took(2.5 * BESIDE, beside=True)
    steps.took(ALONE, forget_errors - 1)
    assert steps.costs.overlapped == pytest.approx(2.5 * BESIDE)
    steps.took(ALONE)
    assert steps.costs.overlapped == pytest.approx(FIRST_MARGIN * BESIDE)
    assert steps.costs.overlapped_expected == pytest.approx(BESIDE)


@pytest.mark.parametrize("kind", STEP_KINDS)
def test_steps_without_training_beside_them_count_in_a_row_while_a_job_could_train(kind: StepKind) -> None:
    steps, (_, forget) = Steps(kind), FORGET[kind]
    steps.beside()
    steps.took(ALONE, forget - 1)
    steps.took(BESIDE, beside=True)
    steps.took(ALONE, forget - 1)
    assert steps.costs.overlapped_expected == pytest.approx(BESIDE), "one was beside training meanwhile"
    steps.jobs.can_train = False
    steps.took(ALONE, forget)
    assert steps.costs.overlapped_expected == pytest.approx(BESIDE), "nothing trained"
    steps.jobs.can_train = True
    steps.took(ALONE)
    assert steps.costs.overlapped_expected == pytest.approx(ALONE)


@pytest.mark.parametrize("kind", STEP_KINDS)
def test_what_a_step_takes_in_turn_counts_as_unknown_when_it_is_to_be_measured_again(kind: StepKind) -> None:
    """Steps that are not known to take less in turn take their turn (`Overlap`)."""
    steps = Steps(kind)
    steps.took(ALONE, 2)
    steps.took(BESIDE, TRIAL_AFTER - 1, beside=True)
    assert steps.costs.serve_expected == pytest.approx(ALONE)
    steps.took(BESIDE, beside=True)
    for _ in range(TRIALS):
        assert steps.costs.serve_expected == float("inf")
        steps.took(2 * ALONE)
    assert steps.costs.serve_expected == pytest.approx(2 * ALONE)


def test_a_step_beside_training_is_never_expected_to_be_faster_than_one_alone() -> None:
    """Those beside training were measured before the device became slower."""
    steps = Steps("decode")
    steps.took(ALONE, 9, beside=True)
    steps.took(3 * ALONE, 9)
    costs = steps.costs
    assert costs.overlapped == costs.serve > costs.serve_expected
    assert costs.overlapped_expected == costs.serve_expected == pytest.approx(3 * ALONE)


def test_the_next_step_is_expected_to_wait_for_its_launch() -> None:
    """Steps that follow one another without a slice between take less; those are what decodes to come are counted
    with."""
    steps = Steps("decode")
    for _ in range(50):
        steps.took(0.012)
        steps.took(0.01, alone=False)
    assert steps.costs.serve_expected == pytest.approx(0.012, rel=0.01)
    assert steps.costs.decode == pytest.approx(0.01, rel=0.01)


def test_slow_steps_count_among_the_decodes_to_come() -> None:
    """One of ten takes three times as long."""
    steps = Steps("decode")
    for _ in range(50):
        steps.took(ALONE, 9, alone=False)
        steps.took(3 * ALONE, alone=False)
    assert steps.costs.decode == pytest.approx(1.2 * ALONE, rel=0.01)
    assert steps.costs.serve_expected == pytest.approx(ALONE, rel=0.01)
