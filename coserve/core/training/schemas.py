"""Bodies of `/sessions`, the native form of training sessions."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from coserve.core.limits import LEAST_NORMAL, MAX_TOKENS, ModuleNames, Seed, TokenIds
from coserve.core.names import AdapterName
from coserve.core.types import Wire

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

    name: AdapterName
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
