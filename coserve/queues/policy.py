"""What a scheduling policy sees and decides. Policies are in `queues/policies`, one a file.

The engine calls `Policy.decide` once a tick and does what it returns. A policy is a pure function of a `View` and the
time: no state, torch, IO or clock. The `View` holds everything about the past that it may use, so the same view at the
same time always gives the same decision.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol


class Waiting(Protocol):
    """A request in the queue. `deadline` of its first token; `pending`: tokens of its prompt; `end`: deadline of its
    last token, infinite without one; `decodes`: most decode steps from its first token to its last."""

    @property
    def arrived(self) -> float: ...
    @property
    def deadline(self) -> float: ...
    @property
    def pending(self) -> int: ...
    @property
    def end(self) -> float: ...
    @property
    def decodes(self) -> int: ...


class Due(NamedTuple):
    """A deadline of a running request's next or last token: the generation steps that its next token takes, and the
    decode steps that follow until the deadline's token. `window`: seconds from which the deadline counted; `credit`:
    the deadline is the last token's time + `window` + `credit`: above 0 if earlier tokens came early, below if late.
    `first`: of a first token."""

    deadline: float
    steps: int = 1
    decodes: int = 0
    window: float = 0.0
    credit: float = 0.0
    first: bool = False


@dataclass(frozen=True, slots=True)
class Costs:
    """Predicted seconds; 0 while unknown."""

    serve: float
    """Of the next generation step: a time that is exceeded as rarely as `slo_attainment` asks for
    (`queues/risk.py`)."""
    micro_step: float
    """Of a training micro-step, likewise."""
    decode: float = 0.0
    """Mean of generation steps without prefill, slow ones included: over many of them, other errors cancel out."""
    overlapped: float = 0.0
    """As `serve`, while the device computes training, too. `serve` where that was not measured."""
    serve_expected: float = math.inf
    """Expected of the step of `serve`; infinite where no such step was measured, or none for long."""
    overlapped_expected: float = math.inf
    """Expected of that of `overlapped`."""
    train_beside: float = 1.0
    """Share of its speed that training has while a step runs beside it."""
    admitting_nobody: Costs | None = None
    """Of a step without the requests that wait; None: the same."""

    def of(self, step: Serve) -> float:
        """Of a step that admits all that wait, or nobody."""
        if not step.admit and self.admitting_nobody is not None:
            return self.admitting_nobody.of(step)
        return self.serve if step.between else self.overlapped


@dataclass(frozen=True, slots=True)
class Turn:
    """The past, for policies in which the two kinds of work take turns."""

    job: str | None = None
    """The job that trained last, until it ends, is paused or waits for samples, which are requests. It may be missing
    in `View.jobs` while its next step is prepared on a thread."""
    batches_since_job: int = 0
    """Inference batches dispatched since such a job's turn last ended."""
    batches_since_micro_batch: int = 0
    """Inference batches dispatched since the last micro-batch ended."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Training slices that were launched. All have ended where slices and steps take turns."""

    slices: int = 0
    """Launched, and not yet done."""
    since_step: bool = False
    """One was launched after the last generation step, not counting those that read results. It may have ended."""
    until: float = 0.0
    """When the device will have computed them, and the steps between them, as predicted."""


@dataclass(frozen=True, slots=True)
class View:
    """The state of the engine that a decision depends on.

    Requests that wait for their adapters to be read are in neither `waiting` nor `running`, but use headroom: it may be
    0 while no request runs.
    """

    waiting: tuple[Waiting, ...]
    """Those that can be admitted now, at most `headroom`, in the order of admission, which may differ from that of
    arrival."""
    queued: int
    """How many requests wait, including `waiting`."""
    first_arrival: float | None
    """Of the oldest of them."""
    running: tuple[Due, ...]
    """The first deadline of the batch for each number of steps and decodes, and each window. Empty while no request of
    the batch can compute anything."""
    step_tokens: int
    """Most tokens of a generation step."""
    headroom: int
    """How many more requests can be admitted."""
    jobs: tuple[str, ...]
    """Jobs that can train, the next one first. Empty while the next one waits for what a slice in flight computes."""
    turn: Turn
    train_waiting_since: float | None
    """When the last slice ended, or the first job came; None without jobs."""
    costs: Costs
    """`costs.micro_step`: of the next micro-step of `jobs[0]`."""
    in_flight: InFlight = InFlight()


@dataclass(frozen=True, slots=True)
class Serve:
    """Admit the first `admit` requests of `View.waiting`, then run one generation step. `between`: the device computes
    it after the slices in flight and before those that are launched later; else beside them."""

    admit: int
    between: bool = False


@dataclass(frozen=True, slots=True)
class Overdue:
    """`Costs.micro_step` of a micro-step that does not fit, and the slack: seconds that the deadlines leave."""

    micro_step: float
    slack: float


@dataclass(frozen=True, slots=True)
class Train:
    """Run up to `micro_steps` micro-steps of a job in `View.jobs`, of its micro-batch (None: all that are left). The
    slice ends early before a micro-step of another kind, and at the micro-batch's end. `overdue`: the slice runs
    although it does not fit into the slack.
    `max_micro_step`: most predicted seconds of a micro-step; where the slice begins a batch, only as many other jobs
    join it."""

    job: str
    micro_steps: int | None
    overdue: Overdue | None = None
    max_micro_step: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Sleep until an event, or until the time `until`."""

    until: float | None


Decision = Serve | Train | Wait


Stream = Literal["partition", "priority"]
"""Training's own: on multiprocessors of its own, or on all of them with a low priority."""


class PolicySettings(Protocol):
    """What policies read of the settings (`config.Config`)."""

    @property
    def policy(self) -> str: ...
    @property
    def batch_requests(self) -> int: ...
    @property
    def inference_delay(self) -> float: ...
    @property
    def ts_n(self) -> int: ...
    @property
    def ts_unit(self) -> str: ...
    @property
    def train_patience(self) -> float: ...
    @property
    def train_floor(self) -> float: ...
    @property
    def train_weight(self) -> float: ...
    @property
    def overlap_steps(self) -> str: ...


class Policy(Protocol):
    def decide(self, view: View, now: float) -> Decision:
        """A decision changes the view, lets time pass, or is a `Wait`: the same view is never passed twice at one
        time."""
        ...


class NamedPolicy(ABC):
    """One that the settings can name, and what else depends on which one they name."""

    in_batches: ClassVar[bool] = False
    """Requests are served in batches that run to their ends, in order of arrival, and no deadline is looked at."""
    stream: ClassVar[Stream | None] = None
    """None: slices and steps take turns on one."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Those that have an effect with this policy, and not with every one."""
    kernel_settings: ClassVar[tuple[str, ...]] = ()
    """Those that decide which kernels an engine needs."""

    @classmethod
    @abstractmethod
    def made(cls, settings: PolicySettings, tpot: float | None) -> NamedPolicy:
        """As the settings say. `tpot`: seconds between the tokens of a usual request; None: unknown."""

    @abstractmethod
    def decide(self, view: View, now: float) -> Decision:
        """See `Policy`."""
