"""The policy's view of the engine, and the statistics behind it. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from coserve.core.link.stats import StepCounts
from coserve.core.training.micro_step import MicroStep
from coserve.generate.plan import Plan
from coserve.queues.costs import ATTAINMENT, UNKNOWN, Prediction, Predictors, SlidingQuantile
from coserve.queues.policy import Alternation, Costs, InFlight, View
from coserve.queues.shapes import STEP_FEATURES, STEP_KINDS, StepKind, StepShape
from coserve.queues.slices import OverlapSpeed, Slices, Trials

NOTHING = InFlight()
PROMPT_STEPS, PROMPT_STEP = 64, 0.9
"""Number of latest steps with prompts, and the quantile of their times, that say how long one takes."""
_KINDS = {
    (kind, overlapped): tuple((each, where) for each in (kind, *STEP_KINDS) for where in (overlapped, not overlapped))
    for kind in STEP_KINDS
    for overlapped in (False, True)
}
"""For a step kind, overlapped with training or not: kinds of measured steps that predict it, best first."""
FORGET: dict[StepKind, tuple[int, int]] = {"decode": (200, 1000), "prefill": (40, 200)}
"""For each kind, two numbers of steps in a row without overlap: after the first, the prediction errors of overlapped
steps are forgotten; after the second, also their times. So both are measured anew."""


class AlternationCounts:
    """Counts of inference batches and fine-tuning turns."""

    def __init__(self) -> None:
        self._job: str | None = None
        self._since_job = self._since_micro_batch = 0

    def dispatched(self) -> None:
        """Count an inference batch."""
        self._since_job += 1
        self._since_micro_batch += 1

    def trained(self, job: str, *, suspended: bool) -> None:
        """A slice of the job ended; `suspended`: in the middle of a micro-batch."""
        self._job = job
        if not suspended:
            self._since_micro_batch = 0

    def view(self, in_training: Callable[[str], bool]) -> Alternation:
        """`in_training`: whether a job has neither ended nor been paused, and does not wait for requests."""
        if self._job is not None and not in_training(self._job):
            self._job, self._since_job = None, 0
        return Alternation(self._job, self._since_job, self._since_micro_batch)


class ReadyJobs(Protocol):
    """The part of `JobRunner` that views need."""

    def ready(self) -> tuple[str, ...]: ...
    def next_micro_step(self, job: str) -> MicroStep: ...
    def micro_batch_tokens(self, job: str) -> int: ...
    def in_training(self, job: str) -> bool: ...


class Views:
    """Predicted times of steps and slices, and the rest of the past that a policy may see."""

    def __init__(self, jobs: ReadyJobs, *, attainment: float = ATTAINMENT, overlaps: bool = True) -> None:
        """`attainment`: fraction of answers that must be in time; `overlaps`: steps may overlap training, so their
        times with overlap are predicted too."""
        self._jobs = jobs
        self._steps, self.slices = Predictors(STEP_FEATURES, attainment), Slices(attainment)
        self.alternation = AlternationCounts()
        self._overlaps = overlaps
        self._in_turn = Counter[StepKind]()
        """For each kind, steps in a row without overlap while jobs could train."""
        self._step_counts = dict[tuple[StepKind, bool], StepCounts]()
        self._trials = Trials()
        self._prompt_steps = SlidingQuantile(PROMPT_STEPS)
        self.decode_seconds = 0.0
        """Mean of a decode step, as of the last view."""
        self.step_seconds = 0.0
        """Expected time of the next generation step, as of the last view."""

    def step_took(self, shape: StepShape, seconds: float, *, overlapped: bool = False) -> None:
        """Add a measured generation step; `overlapped`: the device computed training meanwhile."""
        self._steps.add((shape.kind, overlapped), shape.features, seconds)
        if shape.prefill:
            self._prompt_steps.add(seconds)
        self._trials.ran(shape.kind, overlapped=overlapped)
        last = self._step_counts.get((shape.kind, overlapped), StepCounts(shape.kind, overlapped, 0, 0.0))
        self._step_counts[shape.kind, overlapped] = StepCounts(
            shape.kind, overlapped, last.count + 1, last.seconds + seconds
        )
        if overlapped:
            self._in_turn[shape.kind] = 0
        elif self._jobs.ready():
            self._in_turn[shape.kind] += 1
            self._forget(shape.kind)

    def _forget(self, kind: StepKind) -> None:
        """Forget the times of overlapped steps of this kind if they are old."""
        (margin, all_of_it), steps, own = FORGET[kind], self._in_turn[kind], (kind, True)
        if steps == all_of_it:
            self._steps.forget(own)
            self.slices.overlap_speed[kind] = OverlapSpeed()
        elif steps % margin == 0:
            self._steps.forget_errors(own)

    @property
    def step_counts(self) -> tuple[StepCounts, ...]:
        """Counts and seconds of the measured steps."""
        return tuple(self._step_counts.values())

    @property
    def train_overlap_speed(self) -> float:
        """Training's speed while overlapped with decode steps, as a fraction of its speed without; 1 until measured."""
        speed = self.slices.overlap_speed["decode"]
        return speed.share if speed.measured else 1.0

    @property
    def prompt_step_seconds(self) -> float:
        """The 90% quantile of the latest steps with prompts, in seconds; 0: there were none."""
        return self._prompt_steps.at(PROMPT_STEP)

    def view(self, plan: Plan, now: float, *, in_flight: InFlight = NOTHING, collected: float | None = None) -> View:
        """Build the view for the planned step. `collected`: when the tokens of the launched step are expected; None: no
        step is in flight."""
        jobs = self._jobs.ready()
        self.slices.ready(jobs, now)
        if in_flight.slices and jobs and self._jobs.next_micro_step(jobs[0]) is MicroStep.RESULT:
            jobs = ()  # its micro-batch is suspended, so no other job can begin one
        return View(
            waiting=plan.waiting,
            queued=plan.queued,
            first_arrival=plan.first_arrival,
            running=() if plan.blocked else plan.deadlines.view(collected),
            step_tokens=plan.step_tokens,
            jobs=jobs,
            alternation=self.alternation.view(self._jobs.in_training),
            train_waiting_since=self.slices.waiting_since if jobs else None,
            costs=self._costs(plan, jobs, overlapped=in_flight.slices > 0),
            in_flight=in_flight,
        )

    def _costs(self, plan: Plan, jobs: tuple[str, ...], *, overlapped: bool) -> Costs:
        """Predict costs. `overlapped`: the next step overlaps training."""
        micro_step = UNKNOWN
        if jobs:
            job = jobs[0]
            tokens = self._jobs.micro_batch_tokens(job)
            micro_step = self.slices.predict(job, self._jobs.next_micro_step(job), tokens)
        nobody = None
        if plan.waiting and self._overlaps:
            nobody = self._step_costs(plan.admitting_nobody, micro_step, overlapped=overlapped)
        return self._step_costs(plan.admitting_all, micro_step, overlapped=overlapped, nobody=nobody)

    def _step_costs(
        self, step: StepShape, micro_step: Prediction, *, overlapped: bool, nobody: Costs | None = None
    ) -> Costs:
        step = step._replace(alone=1)  # steps in flight are collected before a slice
        decode, kind, predict = step._replace(prefill=0, pairs=0, alone=0), step.kind, self._steps.predict
        alone = predict(step.features, *_KINDS[kind, False])
        both = predict(step.features, *_KINDS[kind, True]) if self._overlaps else alone
        self.step_seconds = both.expected if overlapped else alone.expected
        self.decode_seconds = predict(decode.features, *_KINDS["decode", False][:2]).mean
        measured = self._steps.knows((kind, False)) and not self._trials.due(kind)
        return Costs(
            serve=alone.most,
            serve_expected=alone.expected if measured else math.inf,
            micro_step=micro_step.most,
            micro_step_expected=micro_step.expected or math.inf,
            decode=self.decode_seconds,
            overlapped=max(alone.most, both.most),
            overlapped_expected=max(alone.expected, both.expected),
            train_overlap_speed=self.slices.overlap_speed[kind].share if self._overlaps else 1.0,
            admitting_nobody=nobody,
        )
