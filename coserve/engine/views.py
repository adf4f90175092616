"""What the policy sees, and what the engine remembers for it. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from typing import Protocol

from coserve.engine.running import STEP_KINDS, RunningRequests, StepKind
from coserve.queues.costs import Estimates
from coserve.queues.inference import InferenceQueue
from coserve.queues.policy import Costs, InFlight, View
from coserve.queues.slices import Slices
from coserve.queues.turns import Turns
from coserve.types import MicroStep

NOTHING = InFlight()


class ReadyJobs(Protocol):
    """What a view needs of the `JobRunner`."""

    def ready(self) -> tuple[str, ...]: ...
    def next_micro_step(self, job: str) -> MicroStep: ...
    def in_training(self, job: str) -> bool: ...


class Views:
    """Views cost little, however long the queue: requests that cannot be admitted now are only counted."""

    def __init__(
        self, queue: InferenceQueue, running: RunningRequests, jobs: ReadyJobs, *, max_running: int, step_tokens: int
    ) -> None:
        """`step_tokens`: maximum number of tokens of a generation step."""
        self._queue, self._running, self._jobs = queue, running, jobs
        self._max_running, self._step_tokens = max_running, step_tokens
        self.steps, self.slices, self.turns = Estimates(), Slices(), Turns()

    def view(self, now: float, *, reading: int, blocked: bool, in_flight: InFlight = NOTHING) -> View:
        """`reading`: how many requests wait for their adapters to be read; `blocked`: no running request can compute anything."""
        jobs = self._jobs.ready()
        self.slices.ready(jobs, now)
        if in_flight.slices and jobs and self._jobs.next_micro_step(jobs[0]) is MicroStep.RESULT:
            jobs = ()  # its micro-batch is suspended: no other job can begin one
        headroom = max(0, self._max_running - len(self._running) - reading)
        waiting = self._queue.waiting(headroom)
        step: StepKind = "prefill" if waiting else self._running.step_kind()
        return View(
            waiting=waiting,
            queued=len(self._queue),
            first_arrival=self._queue.first_arrival,
            running=() if blocked else self._running.view(),
            step_tokens=self._step_tokens,
            headroom=headroom,
            jobs=jobs,
            turn=self.turns.view(self._jobs.in_training),
            train_waiting_since=self.slices.waiting_since if jobs else None,
            costs=Costs(
                serve=self.steps.predict(step, *STEP_KINDS),
                micro_step=self.slices.predict(jobs[0], self._jobs.next_micro_step(jobs[0])) if jobs else 0.0,
                decode=self.steps.predict("decode"),
            ),
            in_flight=in_flight,
        )
