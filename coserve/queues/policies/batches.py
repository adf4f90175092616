"""Batches of inference requests, as in the ETS paper (Algorithm 1 and section 5.2.2)."""

from __future__ import annotations

from dataclasses import dataclass

from coserve.queues.policy import View, Wait

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
        """Whether `size` requests wait, or the oldest has waited longer than `delay`. False without headroom: the
        previous batch still waits for its adapters."""
        if not view.waiting or view.first_arrival is None:
            return False
        return view.queued >= self.size or now - view.first_arrival > self.delay

    def wait(self, view: View) -> Wait:
        """Wait until a batch will be ready; without a timer if no request can be admitted."""
        if not view.waiting or view.first_arrival is None:
            return Wait(None)
        return Wait(view.first_arrival + self.delay + TIMER_MARGIN)
