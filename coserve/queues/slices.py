"""Times of training slices: predicted costs for the policy, how much generation steps slow training down when both run
at once, when to re-measure steps without overlap, and starvation reports for /health. Pure: no torch, no IO, no
clock."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass

from coserve.core.link.stats import Starving
from coserve.core.training.micro_step import MicroStep
from coserve.queues.costs import ATTAINMENT, Prediction, Predictors
from coserve.queues.policy import Train
from coserve.queues.shapes import STEP_KINDS, StepKind

FIRST_GUESS = 0.8
"""The speed until it is measured, as a fraction of the speed without steps."""
ENOUGH, WINDOW = 16, 256
"""Overlapped slices before the speed counts as measured; slices in the window that it is computed from."""
TRIAL_AFTER, TRIALS = 150, 3
"""After `TRIAL_AFTER` overlapped steps of a kind, `TRIALS` steps run without overlap, to re-measure their time."""


class OverlapSpeed:
    """Training speed while steps of one kind run at the same time, as a fraction of its speed without them.

    Learns from slices whose time without steps is known (`alone`). A slice that took `seconds`, of which it overlapped
    steps for `overlapped`, did `alone - (seconds - overlapped)` seconds of its own work during the overlap.
    """

    def __init__(self) -> None:
        self._slices: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """For each slice: seconds overlapped with steps, and seconds of training work done in them."""
        self.share = FIRST_GUESS
        """The fraction, between 0 and 1; `FIRST_GUESS` until measured."""

    def add(self, seconds: float, overlapped: float, alone: float) -> None:
        """Add a slice: it took `seconds`, `overlapped` of them with a step; without steps it would take `alone`."""
        if overlapped <= 0:
            return
        self._slices.append((overlapped, alone - (seconds - overlapped)))
        if self.measured:
            longer, used = map(sum, zip(*self._slices, strict=True))
            self.share = min(max(used / longer, 0.0), 1.0)

    @property
    def measured(self) -> bool:
        return len(self._slices) >= ENOUGH


class Trials:
    """Schedules trials: steps run without overlap although overlap is in use, because whether overlap costs less
    changes with the load."""

    def __init__(self) -> None:
        self._overlapped, self._left = Counter[StepKind](), Counter[StepKind]()

    def ran(self, kind: StepKind, *, overlapped: bool) -> None:
        """Count a measured step of this kind."""
        if not overlapped:
            self._overlapped[kind], self._left[kind] = 0, max(0, self._left[kind] - 1)
            return
        self._overlapped[kind] += 1
        if self._overlapped[kind] == TRIAL_AFTER:
            self._overlapped[kind], self._left[kind] = 0, TRIALS

    def due(self, kind: StepKind) -> bool:
        return self._left[kind] > 0


ANY = "any"
"""Key of the predictor over micro-steps of all kinds."""
SIZED = MicroStep.BEGIN, MicroStep.FORWARD, MicroStep.BACKWARD
"""Kinds whose time grows with the micro-batch."""
MOST_KINDS = 512
"""Predictors kept, over kinds and (job, kind) pairs. A job has about six kinds."""
SIZE = 1024.0
"""Tokens at which predictions are compared. They are linear in tokens, so any two sizes determine them."""


@dataclass(frozen=True)
class LaunchedSlice:
    """A launched slice. `tokens`: of its micro-batch."""

    decision: Train
    kind: MicroStep
    micro_steps: int
    tokens: int


@dataclass(frozen=True)
class EndedSlice(LaunchedSlice):
    """A slice that has ended. `seconds`: from its launch, or from the end of the work before it, to its own end, `at`;
    `overlapped`: seconds of it that overlapped a generation step."""

    seconds: float
    at: float
    overlapped: float = 0.0
    step_kind: StepKind | None = None
    """Kind of the overlapped steps; None: there were none, or both kinds."""


class Slices:
    """Measured slices and predicted micro-steps. Times are seconds on the caller's clock."""

    def __init__(self, attainment: float = ATTAINMENT) -> None:
        """`attainment`: fraction of answers that must be in time."""
        self._costs = Predictors(2, attainment, most=MOST_KINDS)
        self._alone = Predictors(2, attainment, most=MOST_KINDS)
        """Predictors from slices that overlapped no step, by (job, kind)."""
        self.overlap_speed: dict[StepKind, OverlapSpeed] = {kind: OverlapSpeed() for kind in STEP_KINDS}
        self.waiting_since: float | None = None
        """See `View.train_waiting_since`."""
        self.by_patience = 0
        """Slices so far that ran only because of `train_patience` or `train_floor`."""
        self._overdue_in_a_row = 0
        self._overdue: tuple[float, Train] | None = None
        """The last slice if it was overdue, and when the first of the current run of overdue slices began to wait."""

    def ready(self, jobs: tuple[str, ...], now: float) -> None:
        """`jobs` can train now."""
        if not jobs:
            self.waiting_since = self._overdue = None
            self._overdue_in_a_row = 0
        elif self.waiting_since is None:
            self.waiting_since = now

    def predict(self, job: str, kind: MicroStep, tokens: int) -> Prediction:
        """Predict the job's next micro-step in a micro-batch of `tokens` tokens: from its own micro-steps of that kind,
        or else those of other jobs, or else micro-steps of any kind."""
        return self._costs.predict((1.0, tokens), (job, kind), kind, ANY)

    def knows(self, kind: MicroStep) -> bool:
        """Whether micro-steps of this kind were measured, for any job; otherwise their time is guessed from other
        kinds."""
        return self._costs.knows(kind)

    def tokens_within(self, seconds: float | None) -> int | None:
        """Most tokens of a micro-batch whose micro-steps are predicted to take at most `seconds`; None: no known
        limit."""
        if seconds is None:
            return None
        most = math.inf
        for kind in SIZED:
            small, large = (self._costs.predict((1.0, tokens), kind).most for tokens in (SIZE, 2 * SIZE))
            if large > small:
                most = min(most, SIZE + (seconds - small) / (large - small) * SIZE)
            elif small > seconds:
                most = 0
        return None if most == math.inf else max(0, int(most))

    def ran(self, ended: EndedSlice) -> None:
        """Record a slice. Those that run a whole micro-batch mix kinds, so their time is not learned."""
        decision, micro_steps, seconds = ended.decision, ended.micro_steps, ended.seconds
        if decision.micro_steps is not None and micro_steps:
            features, own = (1.0, ended.tokens), (decision.job, ended.kind)
            for key in (own, ended.kind, ANY):
                self._costs.add(key, features, seconds / micro_steps)
            if not ended.overlapped:
                self._alone.add(own, features, seconds / micro_steps)
            elif ended.step_kind is not None and (alone := micro_steps * self._alone.predict(features, own).expected):
                self.overlap_speed[ended.step_kind].add(seconds, ended.overlapped, alone)
        if decision.overdue is None:
            self._overdue, self._overdue_in_a_row = None, 0
        else:
            began = self._overdue[0] if self._overdue is not None else self.waiting_since
            self._overdue = (ended.at if began is None else began), decision
            self.by_patience += 1
            self._overdue_in_a_row += 1
        self.waiting_since = ended.at

    def waits(self, now: float) -> float:
        """Seconds since the last slice; 0 if no job can train."""
        return 0.0 if self.waiting_since is None else now - self.waiting_since

    def starving(self, now: float) -> Starving | None:
        """Return a report after two overdue slices in a row. A single one may be due to a burst of requests."""
        if self._overdue is None or self._overdue_in_a_row < 2:
            return None
        since, decision = self._overdue
        assert decision.overdue is not None, "kept for its reason"
        return Starving(seconds=now - since, micro_step=decision.overdue.micro_step, slack=decision.overdue.slack)
