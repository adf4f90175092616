"""Training overlapped with generation on the whole GPU, paced by deadlines."""

from __future__ import annotations

import math
from dataclasses import replace

from coserve.queues.policies.slack import (
    FIRST_TOKEN_WAIT,
    MAX_SLICE,
    PACED_SETTINGS,
    Slack,
    latest_start,
    micro_steps_within,
    overdue,
)
from coserve.queues.policies.spatial import MAX_SLICES, MIN_SLICE
from coserve.queues.policy import Decision, Overdue, PolicySettings, Serve, View, Wait

LONGEST = MAX_SLICE / MAX_SLICES
"""Predicted seconds of the longest slice: `MAX_SLICE` divided by the slices in flight."""
LONGEST_OVERLAPPED = 12e-3
"""`LONGEST` of slices that steps overlap. Shorter, because a step with prompts is often too slow to overlap, and then
waits for all slices in flight."""
TIMER = 1e-3
"""Seconds by which a timer may be late: the event loop's resolution is a millisecond."""
SPARE_SHARE = 0.1
"""Fraction of TPOT kept free for slow steps. A step overlaps training only if its mean time fits the rest."""
PROMPT_HOLD = 0.05
"""Seconds that prompts may be held back while steps without them overlap training: one step with several prompts costs
training less."""
TURN_WAIT = 0.12
"""Longest wait of a first token, in seconds, where its step cannot overlap training: it waits for the step at which the
batch's next tokens are due."""
AHEAD = 5e-3
"""Seconds before the slices in flight end at which the next step is launched: covers the launch and prediction
errors."""


class Overlap(Slack):
    """Training on a low-priority stream, generation steps on a high-priority one, both with all multiprocessors.

    Up to two slices are in flight, so the device need not wait for the host between them. A decode step is bound by
    memory bandwidth and training by arithmetic, so a step overlapped with a slice costs less than both one after the
    other. Still, each step costs bandwidth. So steps are paced by deadlines as in `Slack`: a step begins when the first
    deadline requires it, given its time while overlapped, or earlier if the device would be idle and no further
    micro-step fits before.

    Without overlap, steps and slices alternate without a pause: a slice is launched only if all in flight end before
    the next step must begin, and that step runs after them and before later ones. This is so where TPOT is too short
    for an overlapped step, or `overlapped` is false. Where only a step with prompts is too slow, prompts wait a little
    while steps without them overlap training. Weight, patience, floor and the full batch are as in `Slack`: while
    requests wait for a place in a full batch, no training is launched.
    """

    stream = "priority"
    settings = (*PACED_SETTINGS, "overlap_steps")

    @classmethod
    def made(cls, settings: PolicySettings, tpot: float | None) -> Overlap:
        return cls(
            settings.train_patience,
            floor=settings.train_floor,
            weight=settings.train_weight,
            tpot=tpot,
            overlapped=settings.overlap_steps == "beside",
        )

    def __init__(
        self,
        patience: float,
        *,
        floor: float = 0.0,
        weight: float = 1.0,
        tpot: float | None = None,
        overlapped: bool = True,
    ) -> None:
        super().__init__(patience, floor=floor, weight=weight, tpot=tpot)
        self._overlapped = overlapped

    def decide(self, view: View, now: float) -> Decision:
        if view.running and view.waiting and self._holds_back(view, now):
            view = _admitting_nobody(view)
        slices, costs, micro_step = view.in_flight.slices, view.costs, view.costs.micro_step
        admit, launches = len(view.waiting), bool(view.jobs) and slices < MAX_SLICES
        if not (view.running or admit):
            return self._train(view, micro_steps_within(LONGEST, micro_step)) if launches else Wait(None)
        overlapped = self._runs_beside(view)
        if not (view.jobs or slices):
            return Serve(admit)
        if view.queued > admit:  # a full batch
            begin = slack = 0.0
        else:
            most, mean = (
                (costs.overlapped, costs.overlapped_expected) if overlapped else (costs.serve, costs.serve_expected)
            )
            wait = FIRST_TOKEN_WAIT if overlapped or not view.running else TURN_WAIT
            begin = latest_start(view, most, mean, self._weight, wait) - TIMER
            slack = begin - (now if overlapped else max(now, view.in_flight.until))
        fits = slack > 0 and slack >= micro_step
        if fits and launches:
            longest = LONGEST_OVERLAPPED if overlapped else min(max(costs.overlapped, MIN_SLICE), LONGEST)
            return self._train(view, micro_steps_within(min(slack, longest), micro_step))
        if slices and slack > 0 and (fits or overlapped):
            return Wait(begin)
        if slices and not overlapped and view.in_flight.until - AHEAD > now:
            return Wait(view.in_flight.until - AHEAD)
        if launches and not slices and overdue(view, now, self._patience, self._floor):
            return self._train(view, 1, Overdue(micro_step, slack))
        return Serve(admit, between=not overlapped)

    def _holds_back(self, view: View, now: float) -> bool:
        """Whether to run the next step without the waiting prompts: it can overlap training only without them, and they
        can still wait."""
        if not view.jobs or view.queued > len(view.waiting) or self._runs_beside(view):
            return False
        without = _admitting_nobody(view)
        if not self._runs_beside(without):
            return False
        step = without.costs.overlapped
        begin = max(now, latest_start(without, step, without.costs.overlapped_expected, self._weight))
        if min(each.arrived for each in view.waiting) + PROMPT_HOLD * self._weight <= begin:
            return False
        only, costs = replace(view, running=()), view.costs
        return begin + step <= latest_start(only, costs.serve, costs.serve_expected, self._weight, TURN_WAIT)

    def _runs_beside(self, view: View) -> bool:
        """Whether the next step overlaps training: it then costs training less than a step without overlap, as
        measured, and is fast enough for the token deadlines."""
        costs = view.costs
        taken = costs.overlapped_expected * (1 - costs.train_overlap_speed)
        if not self._overlapped or costs.serve_expected == math.inf or taken > costs.serve_expected:
            return False
        return all(
            due.steps * costs.overlapped_expected + due.decodes * costs.decode + TIMER
            <= (1 - SPARE_SHARE) * due.window * self._weight
            for due in view.running
        )


def _admitting_nobody(view: View) -> View:
    """The view for a step that admits no waiting request."""
    costs = view.costs.admitting_nobody or view.costs
    return replace(view, waiting=(), queued=view.queued - len(view.waiting), costs=costs)
