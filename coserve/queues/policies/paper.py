"""The ETS paper's policies: Enhanced Temporal Sharing (Algorithm 1) and Temporal Sharing, TS(n)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coserve.queues.policy import Decision, NamedPolicy, PolicySettings, Serve, Train, View, Wait

Unit = Literal["request", "batch"]
"""A fine-tuning turn: a job until it ends, or one micro-batch."""

BATCH_SETTINGS = ("inference_batch_size", "inference_delay")
"""Settings that batching policies read."""
TIMER_MARGIN = 1e-6
"""Seconds added to a wake-up time: timers round, and Algorithm 1 requires `>`."""


@dataclass(frozen=True, slots=True)
class Batching:
    """When an inference batch is ready: `size` in requests, `delay` in seconds."""

    size: int
    delay: float

    def __post_init__(self) -> None:
        assert self.size >= 1 and self.delay >= 0, (self.size, self.delay)

    def ready(self, view: View, now: float) -> bool:
        """Whether `size` requests wait, or the oldest has waited longer than `delay`. False if none can be admitted, as
        while the previous batch waits for its adapters."""
        if not view.waiting or view.first_arrival is None:
            return False
        return view.queued >= self.size or now - view.first_arrival > self.delay

    def wait(self, view: View) -> Wait:
        """Wait until a batch will be ready; without a timer if no request can be admitted."""
        if not view.waiting or view.first_arrival is None:
            return Wait(None)
        return Wait(view.first_arrival + self.delay + TIMER_MARGIN)


class Ets(NamedPolicy):
    """Enhanced Temporal Sharing: Algorithm 1 of the ETS paper, exactly if requests are served in order of arrival.

    Inference goes first. A batch of at most `batch_size` requests is dispatched when that many wait, or when the oldest
    has waited longer than `delay` seconds; it runs to its end. Otherwise a whole micro-batch of fine-tuning runs to its
    end: the next one of the job that came first, as the algorithm's queue holds the batches of fine-tuning requests in
    order of arrival. A later job trains only while that one cannot, or in its micro-batch (docs/design/policies.md).
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
        past = view.alternation
        if self._unit == "request" and past.job is not None:
            return Train(past.job, None) if past.job in view.jobs else Wait(None)
        batches = past.batches_since_job if self._unit == "request" else past.batches_since_micro_batch
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
