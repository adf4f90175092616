"""Metrics that a job reports for each optimizer step, and the times of adapters' loads."""

from __future__ import annotations

from typing import Final

import msgspec

from coserve.core.types import Wire


class Rewards(Wire, frozen=True):
    """Rewards of a preference loss, as means over the pairs; of KTO, over the rows whose label is true and over the
    others. An answer's reward is beta times the log-ratio of its probability to the reference's; of ORPO and SimPO,
    beta times the mean log-probability of its tokens."""

    chosen: float
    rejected: float
    margin: float
    """Reward of the chosen answer minus that of the rejected one."""
    accuracy: float
    """Fraction of pairs with a margin above 0; of KTO, of rows whose reward is above 0 if their label is true, and
    below 0 otherwise."""


class StepMetrics(Wire, frozen=True):
    """Metrics of one optimizer step. `loss` is the mean negative log-likelihood per target token, in nats; with a
    teacher, the mean KL divergence from the teacher; with a preference loss, the mean over pairs."""

    step: int
    total_steps: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    """Tokens in this step's batch."""
    target_tokens: int
    seconds: float
    """Time in the step's slices, without the gaps between them."""
    valid_loss: float | None = None
    valid_loss_before: float | None = None
    """Validation loss before the first step; for jobs with a teacher and validation rows."""
    best_valid_loss: float | None = None
    """Smallest validation loss so far, that of the weights to publish; for jobs with early stopping. With a teacher,
    the loss before the first step counts too."""
    best_step: int | None = None
    """Step after which `best_valid_loss` was measured; 0: before the first step."""
    tokens_per_second: float | None = None
    """`tokens` divided by `seconds`; None if no time was measured."""
    token_accuracy: float | None = None
    """Fraction of target tokens that have the largest logit, 0 to 1."""
    perplexity: float | None = None
    """exp(`loss`), capped at exp(88); None for a job with a teacher, soft targets or a preference loss."""
    valid_token_accuracy: float | None = None
    valid_perplexity: float | None = None
    """Like `perplexity`, for `valid_loss`."""
    rewards: Rewards | None = None
    """Rewards in this step's batch, before its update; for jobs with a preference loss. None if all rows of the batch
    have the same label."""
    valid_rewards: Rewards | None = None
    """Rewards of the validation rows."""


LOAD_CAUSES: Final = ("queue", "read", "hash", "pack", "write", "pages", "defragment", "copy")
"""Phases of adapter loads: waiting for a reader; reading a packed file; hashing PEFT's files; reading and packing them;
writing the packed file, in the background; a request's wait for pages; moving pages to get a free run
of them; copying into the run. The last two are times on the tick, which launches the work."""


class LoadSeconds(msgspec.Struct, frozen=True):
    """Number of adapter loads so far that spent time in one phase, and the seconds."""

    cause: str
    count: int
    seconds: float
