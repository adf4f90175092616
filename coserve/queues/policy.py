"""The interface of scheduling policies: the `View` they see and the `Decision` they return. Policies are in
`queues/policies`, one a file.

The engine calls `Policy.decide` once a tick and does what it returns. A policy is a pure function of a `View` and the
time: no state, torch, IO or clock. The `View` holds everything about the past that it may use, so the same view at the
same time always gives the same decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

from coserve.queues.request import Request


class Due(NamedTuple):
    """A deadline of a running request, for its next or last token. The next token takes `steps` generation steps, then
    `decodes` decode steps lead to the token that is due. `window`: seconds that the target allows; `credit`: how much
    later than last token + `window` the deadline is, above 0 if earlier tokens were early, below if late. `first`: a
    first token is due."""

    deadline: float
    steps: int = 1
    decodes: int = 0
    window: float = 0.0
    credit: float = 0.0
    first: bool = False


@dataclass(frozen=True, slots=True)
class Costs:
    """Predicted seconds; 0 or infinite while unknown."""

    serve: float
    """The next generation step, exceeded as rarely as `slo_attainment` allows (`queues/costs.py`)."""
    micro_step: float
    """The next training micro-step, exceeded as rarely."""
    decode: float = 0.0
    """Mean of a step without prefill, slow outliers included: over many steps other errors cancel out."""
    overlapped: float = 0.0
    """`serve` while overlapped with training; equal to `serve` if not measured."""
    serve_expected: float = math.inf
    """Expected value for `serve`; infinite if no such step was measured lately."""
    overlapped_expected: float = math.inf
    """Expected value for `overlapped`; infinite if no such step was measured lately."""
    micro_step_expected: float = math.inf
    """Expected value for `micro_step`; infinite if unknown."""
    train_overlap_speed: float = 1.0
    """Training's speed while overlapped with a step, as a fraction of its speed without."""
    admitting_nobody: Costs | None = None
    """The costs of a step that admits no waiting request; None: the same."""

    def of(self, step: Serve) -> float:
        """Predicted seconds of this step. If it admits any waiting request, the prediction assumes all."""
        if not step.admit and self.admitting_nobody is not None:
            return self.admitting_nobody.of(step)
        return self.serve if step.between else self.overlapped


@dataclass(frozen=True, slots=True)
class Alternation:
    """The past, for policies that alternate inference batches and fine-tuning turns."""

    job: str | None = None
    """The job that trained last, until it ends, is paused or waits for samples. It may be missing in `View.jobs` while
    its next step is prepared on a thread."""
    batches_since_job: int = 0
    """Inference batches dispatched since a job's turn last ended."""
    batches_since_micro_batch: int = 0
    """Inference batches dispatched since the last micro-batch ended."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Training slices that were launched. Without overlap, `slices` is 0 at each decision."""

    slices: int = 0
    """Launched slices that have not ended."""
    since_step: bool = False
    """Whether a slice was launched after the last generation step (result-reading slices not counted). It may have
    ended."""
    until: float = 0.0
    """Predicted time at which the device has finished the slices and the steps between them."""


@dataclass(frozen=True, slots=True)
class View:
    """The state of the engine that a decision depends on.

    Requests whose adapters are being read are in neither `waiting` nor `running`, but have places in the batch: it may
    be full while no request runs.
    """

    waiting: tuple[Request, ...]
    """Requests that can be admitted now, in order of admission (which may differ from arrival)."""
    queued: int
    """How many requests wait, including `waiting`."""
    first_arrival: float | None
    """Arrival of the oldest waiting request; None if none waits."""
    running: tuple[Due, ...]
    """The batch's first deadline for each distinct (steps, decodes, window). Empty while no request of the batch can
    compute anything."""
    step_tokens: int
    """Token budget of a generation step."""
    jobs: tuple[str, ...]
    """Jobs that can train, the next one first. Empty while the next one waits for the result of a slice in flight."""
    alternation: Alternation
    train_waiting_since: float | None
    """When the last slice ended, or the first job became ready; None without jobs."""
    costs: Costs
    """`costs.micro_step`: of the next micro-step of `jobs[0]`."""
    in_flight: InFlight = InFlight()


@dataclass(frozen=True, slots=True)
class Serve:
    """Admit the first `admit` requests of `View.waiting`, then run one generation step. `between`: the device computes
    it after the slices in flight and before later ones; otherwise overlapped with them."""

    admit: int
    between: bool = False


@dataclass(frozen=True, slots=True)
class Overdue:
    """Why a slice runs although it does not fit: the predicted micro-step and the slack, in seconds."""

    micro_step: float
    slack: float


@dataclass(frozen=True, slots=True)
class Train:
    """Run up to `micro_steps` micro-steps of a job's micro-batch (None: all that are left). The slice ends early before
    a micro-step of another kind, and at the micro-batch's end. `overdue`: the slice runs although it does not fit into
    the slack. `max_micro_step`: most predicted seconds of a micro-step; it limits how many jobs share a new batch."""

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
"""Training's own CUDA stream: on multiprocessors of its own, or on all of them with low priority."""


class PolicySettings(Protocol):
    """The settings that policies read (`config.Config`)."""

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
        """Return what to do now. Every decision except `Wait` changes the view or takes time: the same view is never
        passed twice at one time."""
        ...


class NamedPolicy(Policy):
    """A policy that the settings can name, with the properties that other modules need to know of it."""

    in_batches: ClassVar[bool] = False
    """Whether requests are served in order of arrival, without deadlines, in batches that run to their end. Jobs then
    train in order of arrival as well."""
    stream: ClassVar[Stream | None] = None
    """Training's stream; None: slices and steps share one stream."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Settings that have an effect with this policy but not with every policy."""
    kernel_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that decide which kernels an engine needs."""

    @classmethod
    def made(cls, settings: PolicySettings, tpot: float | None) -> NamedPolicy:
        """Build the policy from the settings, if it has any. `tpot`: seconds between tokens of a typical request; None:
        unknown."""
        return cls()
