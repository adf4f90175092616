"""Scheduling policies: what the engine does next. Pure functions of a `View` and the time; no torch, no IO, no clock.

The engine calls `Policy.decide` once a tick and does what it returns. A policy has no state: the `View` holds everything
about the past that it may use, so the same view at the same time always gives the same decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from coserve.config import Config

TIMER_MARGIN = 1e-6
"""Seconds added to a wake-up time: timers round, and Algorithm 1 requires `>`."""
MAX_SLICE = 0.05
"""Predicted seconds of the longest slice of several micro-steps. A request that arrives meanwhile waits at most that long."""
MAX_MICRO_STEPS = 16
"""Of one slice."""
FIRST_TOKEN_SHARE = 0.2
"""Share of the time to a first token's deadline that training may use."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue. `deadline` of its first token; `steps`: generation steps that the token takes."""

    id: str
    arrived: float
    deadline: float
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Running:
    """A request in the batch. `deadline` of its next token; `steps`: generation steps that the token takes."""

    id: str
    deadline: float
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Costs:
    """Predicted seconds of a generation step and of a training micro-step; 0 while unknown."""

    serve: float
    micro_step: float


@dataclass(frozen=True, slots=True)
class View:
    """The state of the engine that a decision depends on.

    Requests that wait for their adapters to be read are in neither `waiting` nor `running`, but use headroom: it may be 0
    while no request runs.
    """

    waiting: tuple[Waiting, ...]
    """In the order of admission, which may differ from that of arrival."""
    running: tuple[Running, ...]
    """Empty while no request of the batch can compute anything."""
    headroom: int
    """How many more requests can be admitted."""
    jobs: tuple[str, ...]
    """Jobs that can train, the next one first."""
    mid_batch: bool
    """A micro-batch of `jobs[0]` is suspended."""
    batches_since_train: int
    """Inference batches dispatched since the last whole micro-batch."""
    train_waiting_since: float | None
    """When the last slice ended, or the first job came; None without jobs."""
    costs: Costs
    """`costs.micro_step`: of the next micro-step of `jobs[0]`."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Admit the first `admit` requests of `View.waiting`, then run one generation step."""

    admit: int


@dataclass(frozen=True, slots=True)
class Overdue:
    """Predicted seconds of a micro-step that does not fit, and the slack: seconds that the deadlines leave."""

    micro_step: float
    slack: float


@dataclass(frozen=True, slots=True)
class Train:
    """Run up to `micro_steps` micro-steps of the job's micro-batch (None: all that are left). The slice ends early before a
    micro-step of another kind, and at the micro-batch's end. `overdue`: the slice runs although it does not fit into the slack."""

    job: str
    micro_steps: int | None
    overdue: Overdue | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Sleep until an event, or until the time `until`."""

    until: float | None


Decision = Serve | Train | Wait


class Policy(Protocol):
    def decide(self, view: View, now: float) -> Decision:
        """A decision changes the view, lets time pass, or is a `Wait`: the same view is never passed twice at one time."""
        ...


@dataclass(frozen=True, slots=True)
class _Batches:
    """Batching of inference requests, by Algorithm 1 (the ETS paper, section 4.4.3)."""

    size: int
    delay: float

    def __post_init__(self) -> None:
        assert self.size >= 1 and self.delay >= 0, (self.size, self.delay)

    def ready(self, view: View, now: float) -> bool:
        """Whether a batch can be dispatched. Not without headroom: the batch before waits for its adapters."""
        waiting = view.waiting
        if not waiting or not view.headroom:
            return False
        return len(waiting) >= self.size or now - _first_arrival(waiting) > self.delay

    def dispatch(self, view: View) -> Serve:
        return Serve(min(self.size, len(view.waiting), view.headroom))

    def wait(self, view: View) -> Wait:
        if not view.waiting or not view.headroom:
            return Wait(None)
        return Wait(_first_arrival(view.waiting) + self.delay + TIMER_MARGIN)


def _first_arrival(waiting: tuple[Waiting, ...]) -> float:
    """Arrival of the oldest request, which is not always the next one to be admitted."""
    return min(each.arrived for each in waiting)


class Ets:
    """Enhanced Temporal Sharing: Algorithm 1 of the ETS paper, exactly if requests are served in order of arrival.

    Inference goes first. A batch of at most `batch_size` requests is dispatched when that many wait, or when the oldest has
    waited longer than `delay` seconds; it runs to its end. Otherwise a whole micro-batch of fine-tuning runs to its end.
    """

    def __init__(self, batch_size: int, delay: float) -> None:
        self._batches = _Batches(batch_size, delay)

    def decide(self, view: View, now: float) -> Decision:
        if view.running:
            return Serve(0)
        if self._batches.ready(view, now):
            return self._batches.dispatch(view)
        if view.jobs:
            return Train(view.jobs[0], None)
        return self._batches.wait(view)


class TemporalSharing:
    """TS(n): one fine-tuning request after each `n` inference requests (the ETS paper, section 4.4.1).

    Both sides count in batches, as in the paper's evaluation (section 5.2.2). Inference batches are those of `Ets`; a
    fine-tuning batch is one micro-batch. After `n` inference batches one micro-batch runs, whatever waits. A side without a
    batch gives its turn to the other.
    """

    def __init__(self, n: int, batch_size: int, delay: float) -> None:
        assert n >= 1, n
        self._n = n
        self._batches = _Batches(batch_size, delay)

    def decide(self, view: View, now: float) -> Decision:
        if view.running:
            return Serve(0)
        turn = view.mid_batch or view.batches_since_train >= self._n
        if view.jobs and turn:
            return Train(view.jobs[0], None)
        if self._batches.ready(view, now):
            return self._batches.dispatch(view)
        if view.jobs:
            return Train(view.jobs[0], None)
        return self._batches.wait(view)


class Slack:
    """Training in the time that the deadlines of requests leave.

    Requests join and leave the batch at every generation step. The slack is the time to the tightest target minus the
    generation steps needed to meet it, reduced by the share `margin` for errors of prediction. A running request's target is
    the deadline of its next token. A waiting request's is the share `first_token` of the time to its deadline: its prompt
    must be computed anyway, and a later start would be late after the smallest error. There is no slack while a request waits
    for a place in a full batch: paced by deadlines, places would become free too slowly, and the queue could grow without end.

    A training slice runs only if its predicted time fits into the slack. It has as many micro-steps as fit, at least one, at
    most `MAX_MICRO_STEPS` and `MAX_SLICE` seconds. A job that has waited `patience` seconds gets one micro-step regardless
    of deadlines, so training never starves. Without requests, training runs freely.
    """

    def __init__(
        self, max_running: int, patience: float, *, margin: float = 0.2, first_token: float = FIRST_TOKEN_SHARE
    ) -> None:
        assert max_running >= 1 and patience >= 0 and 0 <= margin < 1, (max_running, patience, margin)
        assert 0 < first_token <= 1, first_token
        self._max_running = max_running
        self._patience = patience
        self._margin, self._first_token = margin, first_token

    def decide(self, view: View, now: float) -> Decision:
        admit = max(0, min(len(view.waiting), view.headroom, self._max_running - len(view.running)))
        serves = bool(view.running) or admit > 0
        if not view.jobs:
            return Serve(admit) if serves else Wait(None)
        micro_step = view.costs.micro_step
        if not serves:
            return Train(view.jobs[0], _micro_steps(MAX_SLICE, micro_step))
        slack = self._slack(view, now)
        if len(view.waiting) > admit:
            slack = min(slack, 0.0)
        if slack > 0 and slack >= micro_step:
            return Train(view.jobs[0], _micro_steps(min(slack, MAX_SLICE), micro_step))
        if view.train_waiting_since is not None and now - view.train_waiting_since >= self._patience:
            return Train(view.jobs[0], 1, Overdue(micro_step, slack))
        return Serve(admit)

    def _slack(self, view: View, now: float) -> float:
        """Seconds that training may take from now. At least one request waits or runs."""
        serve = view.costs.serve
        waiting = (
            each.arrived + self._first_token * (each.deadline - each.arrived) - each.steps * serve
            for each in view.waiting
        )
        running = (each.deadline - each.steps * serve for each in view.running)
        return (min(chain(waiting, running)) - now) * (1 - self._margin)


def _micro_steps(seconds: float, micro_step: float) -> int:
    """Number of micro-steps that fit; 1 while their cost is unknown."""
    return max(1, math.floor(min(seconds / micro_step, MAX_MICRO_STEPS))) if micro_step > 0 else 1


def make_policy(config: Config) -> Policy:
    """The policy that the settings name."""
    match config.policy:
        case "ets":
            return Ets(config.inference_batch_size, config.inference_delay)
        case "ts":
            return TemporalSharing(config.ts_n, config.inference_batch_size, config.inference_delay)
        case _:
            return Slack(config.inference_batch_size, config.train_patience)
