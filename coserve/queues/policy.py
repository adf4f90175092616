"""Who runs next: pure functions of a view and a time. No torch, no IO, no clock.

The engine asks `Policy.decide` once a tick and does what it says. A policy keeps no state: all that it may know of the
past stands in the `View`, so that the same view at the same time always gets the same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from coserve.config import Config

TIMER_MARGIN = 1e-6
"""Seconds by which a wake-up lies behind the moment it waits for: timers round, and Algorithm 1 says `>`."""
MAX_SLICE = 0.05
"""Predicted seconds of the longest slice of several micro-steps: what a request that arrives meanwhile may wait for it."""
MAX_MICRO_STEPS = 16


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue. `deadline`: its first token is due; `steps`: generation steps until that token."""

    id: str
    arrived: float
    deadline: float
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Running:
    """A request in the batch. `deadline`: its next token is due; `steps`: generation steps until that token."""

    id: str
    deadline: float
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Costs:
    """Predicted seconds of one generation step and of one training micro-step; 0 until one was measured."""

    serve: float
    micro_step: float


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may know.

    `waiting` is in the order in which they will be admitted, which need not be that of their arrivals. `headroom` is how many
    requests may still be admitted. Requests that were admitted and wait for their adapters to be read are in neither
    `waiting` nor `running`, but take headroom: there may be none while nobody runs. `running` is empty, too, while none of them
    can compute anything. `jobs` are trainable, next first: a
    slice of `jobs[0]` brings it further. `mid_batch` says that a micro-batch of it is suspended. `batches_since_train`
    counts the inference batches dispatched since the last whole micro-batch. `train_waiting_since` is when the last
    slice ended or the first job came; None without jobs. `costs.micro_step` is that of the next micro-step of `jobs[0]`.
    """

    waiting: tuple[Waiting, ...]
    running: tuple[Running, ...]
    headroom: int
    jobs: tuple[str, ...]
    mid_batch: bool
    batches_since_train: int
    train_waiting_since: float | None
    costs: Costs


@dataclass(frozen=True, slots=True)
class Serve:
    """Admit the first `admit` of the waiting, then do one generation step."""

    admit: int


@dataclass(frozen=True, slots=True)
class Overdue:
    """Why a slice had to wait until patience ran out: its predicted seconds, and those that the deadlines left."""

    micro_step: float
    slack: float


@dataclass(frozen=True, slots=True)
class Train:
    """Do `micro_steps` micro-steps of the job's micro-batch, fewer if a micro-step of another kind comes next or it ends before; None: all
    that are left of it. `overdue`: it does not fit into the slack, and runs all the same."""

    job: str
    micro_steps: int | None
    overdue: Overdue | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until something changes, or until the time `until`."""

    until: float | None


Decision = Serve | Train | Wait


class Policy(Protocol):
    def decide(self, view: View, now: float) -> Decision:
        """Every decision changes the view, lets time pass, or is a `Wait` for what changes it: nothing is asked twice."""
        ...


@dataclass(frozen=True, slots=True)
class _Batches:
    """When an inference batch is dispatched, by Algorithm 1 (the ETS paper, section 4.4.3)."""

    size: int
    delay: float

    def __post_init__(self) -> None:
        assert self.size >= 1 and self.delay >= 0, (self.size, self.delay)

    def ready(self, view: View, now: float) -> bool:
        """Whether a batch can be dispatched; never without headroom, where the one before waits for its adapters."""
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
    """When the one that waits longest came: not always the next in line."""
    return min(each.arrived for each in waiting)


class Ets:
    """Enhanced Temporal Sharing: Algorithm 1 of the ETS paper, to the letter if requests are first come, first served.

    Inference goes first: a batch is dispatched as soon as `batch_size` requests wait, or the first of them has waited
    longer than `delay` seconds; it takes at most `batch_size` requests and is performed to its end. Otherwise one batch
    of fine-tuning, a whole micro-batch, is performed to its end; otherwise the loop waits for one of the two.
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

    Both sides count in batches, as the paper's evaluation does (section 5.2.2): an inference batch forms as under `Ets`
    and runs to its end, and a fine-tuning request is a batch of rows, one micro-batch here. After `n` inference batches
    the turn is the job's, whatever waits. A side without a batch to dispatch gives its turn to the other, so that nothing
    idles while there is work.
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
    """Training in the gaps that the deadlines leave.

    Requests join and leave the batch at every generation step. The slack is the time to the tightest deadline (first
    token of the waiting, next token of the running) less the generation steps that it takes to meet it. A training slice
    runs only where its predicted time fits into the slack, less a share `margin` of it for what predictions miss; all
    else goes to generation. A slice has as many micro-steps as fit, up to `MAX_MICRO_STEPS` and `MAX_SLICE` seconds, and at least
    one. A job that has waited `patience` seconds for its slice gets one micro-step whatever the deadlines say: training never
    starves. With no request at all, training runs freely.
    """

    def __init__(self, max_running: int, patience: float, *, margin: float = 0.2) -> None:
        assert max_running >= 1 and patience >= 0 and 0 <= margin < 1, (max_running, patience, margin)
        self._max_running = max_running
        self._patience = patience
        self._margin = margin

    def decide(self, view: View, now: float) -> Decision:
        admit = max(0, min(len(view.waiting), view.headroom, self._max_running - len(view.running)))
        serves = bool(view.running) or admit > 0
        if not view.jobs:
            return Serve(admit) if serves else Wait(None)
        micro_step = view.costs.micro_step
        if not serves:
            return Train(view.jobs[0], _micro_steps(MAX_SLICE, micro_step))
        slack = self._slack(view, now)
        if slack > 0 and slack >= micro_step:
            return Train(view.jobs[0], _micro_steps(min(slack, MAX_SLICE), micro_step))
        if view.train_waiting_since is not None and now - view.train_waiting_since >= self._patience:
            return Train(view.jobs[0], 1, Overdue(micro_step, slack))
        return Serve(admit)

    def _slack(self, view: View, now: float) -> float:
        """Seconds that training may take from now, with somebody waiting or running."""
        serve = view.costs.serve
        promises: list[Waiting | Running] = [*view.waiting, *view.running]
        latest = min(promise.deadline - promise.steps * serve for promise in promises)
        return (latest - now) * (1 - self._margin)


def _micro_steps(seconds: float, micro_step: float) -> int:
    """As many micro-steps as fit; one while their cost is unknown."""
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
