"""Training in the GPU time left once latency targets are met."""

from __future__ import annotations

import math
from typing import ClassVar

from coserve.queues.policy import Decision, Due, NamedPolicy, Overdue, PolicySettings, Serve, Train, View, Wait

DEADLINE_SETTINGS = ("slo_attainment", "shed")
"""Settings of every policy that regards deadlines."""
PACED_SETTINGS = (*DEADLINE_SETTINGS, "train_weight", "train_patience", "train_floor")
"""Settings of policies whose training is paced by deadlines."""
MAX_SLICE = 0.05
"""Predicted seconds of the longest slice of several micro-steps. A request that arrives during it waits at most that
long."""
MAX_MICRO_STEPS = 16
"""Most micro-steps of a slice."""
FIRST_TOKEN_WAIT = MAX_SLICE
"""Seconds that a first token may wait for the batch's next step. A separate step for it would take time from training;
but its prompt must be computed anyway, so holding it back longer gains nothing."""
DELIVERY = 1e-3
"""Seconds by which a token's delivery may take longer than its predecessor's: latency is measured at the client."""
MOST_MARGIN = 0.25
"""Largest fraction of TPOT kept in reserve for slow steps, and as much for slow micro-steps. A larger reserve makes
tokens so early that some of the time gained is lost (`Due.credit` is limited), and more steps run than the targets
need; a micro-step that it does not let fit waits for its patience. Later tokens make up for a slow one."""

DECODE_MARGIN = 1.1
"""Margin on the mean decode time over all steps to a last token: over many steps most errors cancel out."""


class Slack(NamedPolicy):
    """Training in the GPU time left once the requests' deadlines are met.

    Requests join and leave the batch at every generation step. The slack is the time to the tightest target, minus the
    generation steps needed to meet it, minus `DELIVERY`. A running request's target is the deadline of its next token.
    A waiting request's step begins `FIRST_TOKEN_WAIT` after its arrival, or earlier if its deadline requires it. A
    request with a deadline for its last token is assumed to generate `max_tokens`, each in a decode step. Predicted
    times of steps and micro-steps are quantiles chosen by `slo_attainment` (`queues/costs.py`), up to `MOST_MARGIN`;
    there is no other margin. `weight` is the fraction of each deadline's time that training may use: less weight,
    faster answers and less training. The slack is 0 while a request waits for a place in a full batch: paced by
    deadlines, places would free up too slowly, and the queue could grow without bound.

    A training slice runs only if its predicted time fits the slack. It has as many micro-steps as fit, at least one, at
    most `MAX_MICRO_STEPS` and `MAX_SLICE` seconds. So that training never starves, one micro-step runs regardless of
    deadlines once training as a whole has waited `patience` seconds, or so long that the micro-step takes the fraction
    `floor` of the time. Without requests, training runs freely. Jobs are batched together only while a micro-step takes
    at most `tpot` seconds, so that it fits between the tokens of requests that arrive meanwhile.
    """

    settings: ClassVar[tuple[str, ...]] = PACED_SETTINGS

    @classmethod
    def made(cls, settings: PolicySettings, tpot: float | None) -> Slack:
        return cls(settings.train_patience, floor=settings.train_floor, weight=settings.train_weight, tpot=tpot)

    def __init__(self, patience: float, *, floor: float = 0.0, weight: float = 1.0, tpot: float | None = None) -> None:
        """`tpot`: seconds between tokens of a typical request."""
        assert patience >= 0 and 0 <= floor < 1 and 0 <= weight <= 1, (patience, floor, weight)
        self._patience, self._floor, self._weight, self._tpot = patience, floor, weight, tpot

    def decide(self, view: View, now: float) -> Decision:
        admit = len(view.waiting)
        serves = bool(view.running) or admit > 0
        if not view.jobs:
            return Serve(admit) if serves else Wait(None)
        micro_step = view.costs.micro_step
        if not serves:
            return self._train(view, micro_steps_within(MAX_SLICE, micro_step))
        full = view.queued > admit
        slack = 0.0 if full else self._slack(view, now)
        if _fits(view, slack):
            return self._train(view, _micro_steps_before_token(view, min(slack, MAX_SLICE)))
        if overdue(view, now, self._patience, self._floor):
            return self._train(view, 1, Overdue(micro_step, slack))
        return Serve(admit)

    def _train(self, view: View, micro_steps: int, overdue: Overdue | None = None) -> Train:
        return Train(view.jobs[0], micro_steps, overdue, self._tpot)

    def _slack(self, view: View, now: float) -> float:
        """Seconds that training may take from now on. At least one request waits or runs."""
        return latest_start(view, view.costs.serve, view.costs.serve_expected, self._weight) - DELIVERY - now


def latest_start(
    view: View, serve: float, mean: float, weight: float, first_token_wait: float = FIRST_TOKEN_WAIT
) -> float:
    """Latest time at which the next generation step may begin so that every target is met. A step takes at most `serve`
    seconds, `mean` as expected; `weight`: see `Slack`. At least one request waits or runs."""
    decode, wait, step_tokens = DECODE_MARGIN * view.costs.decode, first_token_wait * weight, view.step_tokens
    tightest = min(
        [
            _due(due, weight, wait)
            - min(due.steps * serve, due.steps * mean + MOST_MARGIN * due.window)
            - due.decodes * decode
            for due in view.running
        ],
        default=math.inf,
    )
    tokens = 0  # prompt tokens so far
    for each in view.waiting:
        tokens += each.pending
        steps = -(-tokens // step_tokens)
        target = min(each.arrived + wait, each.deadline - (1 - weight) * (each.deadline - each.arrived) - steps * serve)
        end = each.end
        if end < math.inf:
            end = each.arrived + weight * (each.end - each.arrived) - steps * serve - each.decodes * decode
        tightest = min(tightest, target, end)
    return tightest


def _due(due: Due, weight: float, wait: float) -> float:
    """Target time of a running request's token. Below weight 1, earlier tokens lend it no time. A first token waits for
    the next step no longer than one in the queue."""
    target = due.deadline - (1 - weight) * due.window - (max(0.0, due.credit) if weight < 1 else 0.0)
    return min(target, due.deadline - due.window + wait) if due.first else target


def overdue(view: View, now: float, patience: float, floor: float) -> bool:
    """Whether training has waited `patience` seconds since its last slice, or so long that its next micro-step takes
    the fraction `floor` of the time. Never twice without a generation step between: a patience shorter than a step
    would leave requests no time."""
    since, micro_step = view.train_waiting_since, view.costs.micro_step
    if since is None or view.in_flight.since_step:
        return False
    longest = min(patience, micro_step * (1 / floor - 1)) if floor and micro_step else patience
    return now - since >= longest


def _fits(view: View, slack: float) -> bool:
    """Whether a micro-step fits. At least one request waits or runs."""
    costs = view.costs
    return slack > 0 and slack >= min(costs.micro_step, costs.micro_step_expected + _reserve(view))


def _micro_steps_before_token(view: View, seconds: float) -> int:
    """Number of micro-steps that fit, at least 1. At least one request waits or runs."""
    costs, usual = view.costs, max(0.0, seconds - _reserve(view))
    return max(micro_steps_within(seconds, costs.micro_step), micro_steps_within(usual, costs.micro_step_expected))


def _reserve(view: View) -> float:
    """Most seconds kept in reserve for slow micro-steps."""
    return MOST_MARGIN * min([due.window for due in view.running], default=math.inf)


def micro_steps_within(seconds: float, micro_step: float) -> int:
    """Number of micro-steps that fit; 1 while their cost is unknown."""
    return max(1, math.floor(min(seconds / micro_step, MAX_MICRO_STEPS))) if micro_step > 0 else 1
