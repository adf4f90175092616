"""Inference first: training only while no request can be served."""

from __future__ import annotations

from coserve.queues.policies.slack import MAX_SLICE, micro_steps_within
from coserve.queues.policy import Decision, Serve, Train, View, Wait


class InferenceFirst:
    """Strict priority of inference. Requests join and leave the batch at every generation step.

    Training runs only while no request can be served, in slices of at most `MAX_SLICE` predicted seconds, so that a new
    request waits for one slice or one micro-step. Under a steady load that leaves no idle time, jobs do not advance.
    """

    def __init__(self, max_running: int) -> None:
        assert max_running >= 1, max_running
        self._max_running = max_running

    def decide(self, view: View, now: float) -> Decision:
        admit = max(0, min(len(view.waiting), view.headroom, self._max_running - len(view.running)))
        if view.running or admit:
            return Serve(admit)
        if view.jobs:
            return Train(view.jobs[0], micro_steps_within(MAX_SLICE, view.costs.micro_step))
        return Wait(None)
