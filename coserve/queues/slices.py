"""What the engine remembers of training slices: for the policy, and for those who ask why training stands. Pure."""

from __future__ import annotations

from coserve.link import Starving
from coserve.queues.costs import Estimates
from coserve.queues.policy import Train
from coserve.types import MicroStep

ANY = "any"
"""Micro-steps of all kinds together."""


class Slices:
    """Times are seconds on the clock of the caller."""

    def __init__(self) -> None:
        self._costs = Estimates()
        self._jobs: frozenset[str] = frozenset()
        self.waiting_since: float | None = None
        """When the last slice ended, or the first job came; None without jobs."""
        self.by_patience = 0
        """Slices so far that ran only because their job had waited `train_patience`."""
        self._in_a_row = 0
        self._late: tuple[float, Train] | None = None
        """The last slice if it was one of those, and when the first of their row began to wait."""

    def ready(self, jobs: tuple[str, ...], now: float) -> None:
        """Which jobs wait for a slice now; the costs of others are forgotten."""
        if (known := frozenset(jobs)) != self._jobs:
            self._jobs = known
            self._costs.keep(lambda key: not isinstance(key, tuple) or key[0] in known)
        if not jobs:
            self.waiting_since = self._late = None
            self._in_a_row = 0
        elif self.waiting_since is None:
            self.waiting_since = now

    def predict(self, job: str, kind: MicroStep) -> float:
        """Seconds of the job's next micro-step; before it had any of its kind, of other jobs' micro-steps of that kind, or of any micro-step.
        0 if nothing is known."""
        return self._costs.predict((job, kind), kind, ANY)

    def ran(self, decision: Train, kind: MicroStep, micro_steps: int, seconds: float, now: float) -> None:
        """A slice of `micro_steps` micro-steps ended now. Only slices of one kind are learned from: all but whole micro-batches."""
        if decision.micro_steps is not None and micro_steps:
            for key in ((decision.job, kind), kind, ANY):
                self._costs.add(key, seconds / micro_steps)
        if decision.overdue is None:
            self._late, self._in_a_row = None, 0
        else:
            began = self._late[0] if self._late is not None else self.waiting_since
            self._late = (now if began is None else began), decision
            self.by_patience += 1
            self._in_a_row += 1
        self.waiting_since = now

    def starving(self, now: float) -> Starving | None:
        """Set once two slices in a row ran by patience alone: one may be a burst of requests."""
        if self._late is None or self._in_a_row < 2:
            return None
        since, decision = self._late
        assert decision.overdue is not None, "kept for its reason"
        return Starving(seconds=now - since, micro_step=decision.overdue.micro_step, slack=decision.overdue.slack)
