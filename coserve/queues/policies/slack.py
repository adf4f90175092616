"""Training in the time that deadlines leave."""

from __future__ import annotations

import math

from coserve.queues.policy import Decision, Overdue, Serve, Train, View, Wait

MAX_SLICE = 0.05
"""Predicted seconds of the longest slice of several micro-steps. A request that arrives meanwhile waits at most that long."""
MAX_MICRO_STEPS = 16
"""Of one slice."""
FIRST_TOKEN_SHARE = 0.2
"""Share of the time to a first token's deadline that training may use."""


class Slack:
    """Training in the time that the deadlines of requests leave.

    Requests join and leave the batch at every generation step. The slack is the time to the tightest target minus the
    generation steps needed to meet it, reduced by the share `margin` for errors of prediction. A running request's target is
    the deadline of its next token. A waiting request's is the share `first_token` of the time to its deadline: its prompt
    must be computed anyway, and a later start would be late after the smallest error. A request with a deadline of its last
    token is planned to have `max_tokens`, each in a decode step. Training uses at most the share `weight` of the time that any
    deadline gives: less weight, faster answers and less training. There is no slack while a request waits
    for a place in a full batch: paced by deadlines, places would become free too slowly, and the queue could grow without end.

    A training slice runs only if its predicted time fits into the slack. It has as many micro-steps as fit, at least one, at
    most `MAX_MICRO_STEPS` and `MAX_SLICE` seconds. A job that has waited `patience` seconds gets one micro-step regardless
    of deadlines, so training never starves. Without requests, training runs freely.
    """

    def __init__(
        self, patience: float, *, weight: float = 1.0, margin: float = 0.2, first_token: float = FIRST_TOKEN_SHARE
    ) -> None:
        assert patience >= 0 and 0 <= margin < 1 and 0 < first_token <= 1, (patience, margin, first_token)
        assert 0 <= weight <= 1, weight
        self._patience, self._weight = patience, weight
        self._margin, self._first_token = margin, first_token

    def decide(self, view: View, now: float) -> Decision:
        admit = len(view.waiting)
        serves = bool(view.running) or admit > 0
        if not view.jobs:
            return Serve(admit) if serves else Wait(None)
        micro_step = view.costs.micro_step
        if not serves:
            return Train(view.jobs[0], micro_steps_within(MAX_SLICE, micro_step))
        full = view.queued > admit
        if not full and (slack := self._slack(view, now)) > 0 and slack >= micro_step:
            return Train(view.jobs[0], micro_steps_within(min(slack, MAX_SLICE), micro_step))
        if view.train_waiting_since is not None and now - view.train_waiting_since >= self._patience:
            slack = self._slack(view, now)
            return Train(view.jobs[0], 1, Overdue(micro_step, min(slack, 0.0) if full else slack))
        return Serve(admit)

    def _slack(self, view: View, now: float) -> float:
        """Seconds that training may take from now. At least one request waits or runs."""
        serve, decode, weight = view.costs.serve, view.costs.decode, self._weight
        share, step_tokens = self._first_token * weight, view.step_tokens
        tightest = min(
            [
                due.deadline - (1 - weight) * due.window - due.steps * serve - due.decodes * decode
                for due in view.running
            ],
            default=math.inf,
        )
        tokens = 0  # of the prompts so far
        for each in view.waiting:
            tokens += each.tokens
            steps = -(-tokens // step_tokens)
            target = each.arrived + share * (each.deadline - each.arrived) - steps * serve
            end = each.end
            if end < math.inf:
                end = each.arrived + weight * (each.end - each.arrived) - steps * serve - each.decodes * decode
            tightest = min(tightest, target, end)
        return (tightest - now) * (1 - self._margin)


def micro_steps_within(seconds: float, micro_step: float) -> int:
    """Number of micro-steps that fit; 1 while their cost is unknown."""
    return max(1, math.floor(min(seconds / micro_step, MAX_MICRO_STEPS))) if micro_step > 0 else 1
