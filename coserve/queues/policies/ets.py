"""Enhanced Temporal Sharing (ETS)."""

from __future__ import annotations

from coserve.queues.policies.batches import BATCH_SETTINGS, Batching
from coserve.queues.policy import Decision, NamedPolicy, PolicySettings, Serve, Train, View


class Ets(NamedPolicy):
    """Enhanced Temporal Sharing: Algorithm 1 of the ETS paper, exactly if requests are served in order of arrival.

    Inference goes first. A batch of at most `batch_size` requests is dispatched when that many wait, or when the oldest
    has waited longer than `delay` seconds; it runs to its end. Otherwise a whole micro-batch of fine-tuning runs to its
    end: the next one of the job that came first, as the algorithm's queue holds the batches of fine-tuning requests in
    order of arrival.
    """

    in_batches = True
    settings = BATCH_SETTINGS

    @classmethod
    def made(cls, settings: PolicySettings, tpot: float | None) -> Ets:
        return cls(settings.batch_requests, settings.inference_delay)

    def __init__(self, batch_size: int, delay: float) -> None:
        self._batching = Batching(batch_size, delay)

    def decide(self, view: View, now: float) -> Decision:
        if view.running:
            return Serve(0)
        if self._batching.ready(view, now):
            return Serve(min(self._batching.size, len(view.waiting)))
        if view.jobs:
            return Train(view.jobs[0], None)
        return self._batching.wait(view)
