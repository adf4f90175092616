"""Training sessions of clients: bodies of `/sessions`, their native form, and what the API process asks of the engine.
A session is a job whose next step comes from a client. No torch."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from coserve.core.limits import LEAST_NORMAL, MAX_TOKENS, ModuleNames, Seed, TokenIds
from coserve.core.names import AdapterName, Name
from coserve.core.training.jobs import JobSpec
from coserve.core.types import AdapterRef, Wire

Numbers = Annotated[list[float], Meta(max_length=MAX_TOKENS)]


class SessionRequest(Wire, frozen=True, omit_defaults=True):
    """Body of `POST /sessions`. It is answered once the session is in memory."""

    r: int = 16
    """LoRA rank."""
    alpha: float | None = None
    """None: `2 * r`."""
    targets: ModuleNames | None = None
    """Suffixes of module names; None: every linear site of the decoder layers."""
    seed: Seed = 0
    state: Annotated[str, Meta(max_length=256)] | None = None
    """`SESSION/NAME` of a saved state to begin with. `r`, `alpha`, `targets` and `seed` are then the saved ones."""
    with_optimizer: bool = True
    """Whether the saved moments are loaded too."""


class Session(Wire, frozen=True):
    """A training session. It ends with a `DELETE`, with its engine, or when no call came for `session_timeout`
    seconds."""

    id: str
    rank: int
    targets: list[str] | None
    seed: int


class SessionExample(Wire, frozen=True, omit_defaults=True):
    """Tokens, and what to predict after each of them; or only after those whose indices are in `after`."""

    tokens: TokenIds
    labels: TokenIds
    """The target after each token (or after those of `after`)."""
    after: TokenIds | None = None
    """Ascending indices of the tokens after which a target is predicted; None: after all."""
    weights: Numbers | None = None
    """For `cross_entropy`; any sign."""
    sampled: Numbers | None = None
    """Log-probabilities with which the labels were sampled, for the policy gradients."""
    advantages: Numbers | None = None
    ratio_mask: Numbers | None = None
    """For `gspo`: not 0 for the targets that count in the sequence's ratio."""


class ComputeRequest(Wire, frozen=True, omit_defaults=True):
    """Body of `forward_backward` and `forward`. The loss is summed over all targets."""

    examples: Annotated[list[SessionExample], Meta(min_length=1, max_length=16384)]
    loss: Annotated[str, Meta(max_length=64)] = "cross_entropy"
    """`cross_entropy`, `importance_sampling`, `ppo`, `cispo`, `dro` or `gspo`."""
    config: Annotated[dict[Annotated[str, Meta(max_length=64)], float], Meta(max_length=16)] = {}
    """`clip_low_threshold` and `clip_high_threshold` of `ppo`, `cispo` and `gspo`, `beta` of `dro`."""


class ComputeResult(Wire, frozen=True):
    loss: float
    log_probs: list[list[float]]
    """Log-probability of each target, for each example."""


class OptimStepRequest(Wire, frozen=True, omit_defaults=True):
    """Parameters of AdamW for one step: body of `optim_step`, and Tinker's `adam_params`."""

    learning_rate: Annotated[float, Meta(ge=0, le=100)] = 1e-4
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Meta(ge=LEAST_NORMAL, le=1)] = 1e-12
    """Not 0: where a gradient is 0, as those of A at first, the update would be 0 / 0."""
    weight_decay: Annotated[float, Meta(ge=0, le=100)] = 0.0
    grad_clip_norm: Annotated[float, Meta(ge=0)] = 0.0
    """Largest norm of the gradients; 0: no clipping."""


class OptimStepResult(Wire, frozen=True):
    grad_norm: float
    step: int


class SaveStateRequest(Wire, frozen=True):
    """Body of `save`: weights and moments, durably."""

    name: Name
    overwrite: bool = False


class SavedState(Wire, frozen=True):
    state: str
    """Value for `state` of `POST /sessions`."""


class PublishRequest(Wire, frozen=True):
    """Body of `publish`: the weights become the next version of an adapter, served at once."""

    adapter: AdapterName


class PublishedAdapter(Wire, frozen=True):
    adapter: str
    version: int


class ClosedSession(Wire, frozen=True):
    id: str


class SessionSpec(JobSpec, frozen=True):
    """A session as the engine sees it: a job without a corpus. `tokens` and `longest`: the most tokens of a
    micro-batch, for the memory plan; `version` and the schedule are unused."""

    state: tuple[str, str] | None = None
    """Run and name of the saved state to begin with: `DataFolder.session_state`."""
    with_optimizer: bool = False
    """Whether the saved moments and step count are loaded too."""


class Compute(Struct, frozen=True, tag=True):
    """Forward, and backward if it `learns`, of the summed loss. The answer's `values` are the log-probabilities of all
    targets in order (fp32), its `metrics` have the loss."""

    batch: bytes
    """Examples, encoded by `data.corpus.batch.examples_out`."""
    loss: str
    config: dict[str, float]
    learns: bool


class Step(Struct, frozen=True, tag=True):
    """Update the weights with the gradients summed since the last step."""

    adam: OptimStepRequest


class SaveState(Struct, frozen=True, tag=True):
    """Write weights and moments to the data folder, durably."""

    run: str
    name: str
    project: str
    """The project that owns the state."""


class SaveAdapter(Struct, frozen=True, tag=True):
    """Make the weights available to requests as `ref`: with files, or in memory alone until `DropAdapter`."""

    ref: AdapterRef
    files: bool


Call = Compute | Step | SaveState | SaveAdapter
"""A client's call of its session. Calls are executed in order."""
