"""What a job reports of each optimizer step."""

from __future__ import annotations

from coserve.core.types import Wire


class Rewards(Wire, frozen=True):
    """Means over pairs of answers. An answer's reward is beta times the log of its probability, relative to the
    reference's."""

    chosen: float
    rejected: float
    margin: float
    """The chosen answer's less the rejected one's."""
    accuracy: float
    """Share of the pairs with a margin above 0."""


class StepMetrics(Wire, frozen=True):
    """One optimizer step. `loss` is the mean negative log-likelihood per target token, in nats; of a job with a
    teacher, the mean Kullback-Leibler divergence from the teacher's distributions; of one with a DPO loss, its mean
    over the pairs."""

    step: int
    total_steps: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    """Tokens this step read."""
    target_tokens: int
    seconds: float
    """Time in the step's slices, without the time between them."""
    valid_loss: float | None = None
    valid_loss_before: float | None = None
    """Before the first step; of jobs with a teacher and validation rows."""
    best_valid_loss: float | None = None
    """The smallest one so far, with a teacher the one before the first step included: of the weights that are
    published. Of jobs with early stopping."""
    best_step: int | None = None
    """After which `best_valid_loss` was measured; 0: before the first one."""
    tokens_per_second: float | None = None
    """`tokens` by `seconds`; None if no time was measured."""
    token_accuracy: float | None = None
    """Share of the target tokens whose logit is the largest, 0 to 1."""
    perplexity: float | None = None
    """exp of `loss`, at most exp(88); None for a job with a teacher or a DPO loss."""
    valid_token_accuracy: float | None = None
    valid_perplexity: float | None = None
    """With `valid_loss`; as `perplexity`."""
    rewards: Rewards | None = None
    """Of the pairs that this step learned from, before its update; of jobs with a DPO loss."""
    valid_rewards: Rewards | None = None
    """Of the validation rows."""
