"""Temporal Sharing, TS(n)."""

from __future__ import annotations

from typing import Literal

from coserve.queues.policies.batches import BATCH_SETTINGS, Batching
from coserve.queues.policy import Decision, NamedPolicy, PolicySettings, Serve, Train, View, Wait

Unit = Literal["request", "batch"]
"""A fine-tuning turn: a job until it ends, or one micro-batch."""


class TemporalSharing(NamedPolicy):
    """TS(n): one fine-tuning turn after each `n` inference batches (ETS paper, section 4.4.1).

    A turn is not interrupted. With the unit "request" it is one fine-tuning request: a job trains until it ends, is
    paused or is cancelled, and requests wait meanwhile. While its next step is prepared on a thread, nothing else runs.
    A job that must wait for its samples (`sample_prompts`) ends its turn, because samples are requests. With the unit
    "batch" it is one micro-batch, as in Algorithm 1.

    An inference batch holds the requests that arrived within `delay` seconds of its first one, at most `batch_size`. It
    is dispatched when it is complete (section 5.2.2). A side with nothing to dispatch yields its turn. See docs/LOG.md
    (Scheduling) for other readings of the paper.
    """

    in_batches = True
    settings = (*BATCH_SETTINGS, "ts_n", "ts_unit")

    @classmethod
    def made(cls, settings: PolicySettings, tpot: float | None) -> TemporalSharing:
        unit: Unit = "batch" if settings.ts_unit == "batch" else "request"
        return cls(settings.ts_n, settings.batch_requests, settings.inference_delay, unit)

    def __init__(self, n: int, batch_size: int, delay: float, unit: Unit = "request") -> None:
        assert n >= 1, n
        self._n, self._unit = n, unit
        self._batching = Batching(batch_size, delay)

    def decide(self, view: View, now: float) -> Decision:
        if view.running:
            return Serve(0)
        turn = view.turn
        if self._unit == "request" and turn.job is not None:
            return Train(turn.job, None) if turn.job in view.jobs else Wait(None)
        batches = turn.batches_since_job if self._unit == "request" else turn.batches_since_micro_batch
        if view.jobs and (batches >= self._n or not self._batching.ready(view, now)):
            return Train(view.jobs[0], None)
        if self._batching.ready(view, now):
            return Serve(self._size(view))
        return self._batching.wait(view)

    def _size(self, view: View) -> int:
        """Number of requests in the complete batch."""
        assert view.first_arrival is not None, "a batch without requests"
        complete = view.first_arrival + self._batching.delay
        return max(1, min(self._batching.size, sum(each.arrived <= complete for each in view.waiting)))
