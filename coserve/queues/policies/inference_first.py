"""Inference first: training only while no request can be served."""

from __future__ import annotations

from coserve.queues.policies.slack import DEADLINE_SETTINGS, MAX_SLICE, micro_steps_within
from coserve.queues.policy import Decision, NamedPolicy, Serve, Train, View, Wait


class InferenceFirst(NamedPolicy):
    """Strict priority of inference. Requests join and leave the batch at every generation step.

    Training runs only while no request can be served, in slices of at most `MAX_SLICE` predicted seconds, so that a new
    request waits for one slice or one micro-step. Under a steady load that leaves no idle time, jobs do not advance.
    """

    settings = DEADLINE_SETTINGS

    def decide(self, view: View, now: float) -> Decision:
        if view.running or view.waiting:
            return Serve(len(view.waiting))
        if view.jobs:
            return Train(view.jobs[0], micro_steps_within(MAX_SLICE, view.costs.micro_step))
        return Wait(None)
