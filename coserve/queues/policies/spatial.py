"""Spatial sharing: training and generation at the same time, each on its own multiprocessors."""

from __future__ import annotations

from coserve.queues.policies.slack import DEADLINE_SETTINGS, MAX_SLICE, micro_steps_within
from coserve.queues.policy import Decision, NamedPolicy, Serve, Train, View, Wait

MAX_SLICES = 2
"""Slices in flight: the device begins the second one without waiting for the host."""
MIN_SLICE = 0.005
"""Least predicted seconds of a slice: shorter ones cost the host more than they gain. If a generation step takes
longer, slices last as long as it. Even longer ones would delay the next step where the host launches slower than the
device computes."""


class Spatial(NamedPolicy):
    """Spatial sharing (ETS paper, section 4.4.1): training and generation never wait for each other; each has its own
    multiprocessors.

    Generation steps run whenever a request can be served; requests join and leave the batch at each. At most one
    training slice is launched between two steps, and overlaps the steps that follow. A slice is about as long as a
    step, so with `MAX_SLICES` in flight training does not stop while the host waits for a step.
    """

    stream = "partition"
    settings = (*DEADLINE_SETTINGS, "training_sm_share")
    kernel_settings = ("training_sm_share",)

    def decide(self, view: View, now: float) -> Decision:
        serves = bool(view.running or view.waiting)
        if view.jobs and view.in_flight.slices < MAX_SLICES and not (serves and view.in_flight.since_step):
            seconds = min(max(view.costs.overlapped, MIN_SLICE), MAX_SLICE)
            return Train(view.jobs[0], micro_steps_within(seconds, view.costs.micro_step))
        if serves:
            return Serve(len(view.waiting))
        return Wait(None)
