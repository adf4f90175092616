"""Losses over chunks of logits, summed over the chunk, in nats, and how many labels the logits predict. Logits may be this rank's part of
the vocabulary.

Letters: K tokens whose next token is a target, V vocabulary, S tokens of a rank, P pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from coserve.parallel.vocabulary import VocabularyShard

LARGEST_EXPONENT = 88.0
"""exp of it is finite in fp32, in which trackers keep values."""


def perplexity(loss: float) -> float:
    """exp of a mean negative log-likelihood in nats, at most exp(`LARGEST_EXPONENT`)."""
    return math.exp(min(loss, LARGEST_EXPONENT))


def negative_log_likelihood(logits: Tensor, labels_K: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """Of the labels, summed (fp32, scalar), and how many of them are `predicted`. `logits`: (K, V), or (K, S) with a `shard`."""
    if shard is not None:
        losses_K, count = shard.cross_entropy(logits, labels_K)
        return losses_K.sum(), count
    return functional.cross_entropy(logits.float(), labels_K, reduction="sum"), predicted(logits, labels_K)


def token_losses(logits: Tensor, labels_K: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """As `negative_log_likelihood`, of each label (fp32, (K))."""
    if shard is not None:
        return shard.cross_entropy(logits, labels_K)
    return functional.cross_entropy(logits.float(), labels_K, reduction="none"), predicted(logits, labels_K)


def divergence(
    logits: Tensor, teacher: Tensor, labels_K: Tensor, shard: VocabularyShard | None
) -> tuple[Tensor, Tensor]:
    """The Kullback-Leibler divergence of the student's distributions from the teacher's (fp32, scalar): 0 where they are equal. And how
    many of the labels the student has `predicted`.

    Both logits are (K, V), or (K, S) with a `shard`, whose parts are gathered. Differentiable in `logits`.
    """
    if shard is not None:
        logits, teacher = shard.gather(logits), shard.gather(teacher)
    student_KV, teacher_KV = logits.float().log_softmax(-1), teacher.float().log_softmax(-1)
    return functional.kl_div(student_KV, teacher_KV, reduction="sum", log_target=True), predicted(logits, labels_K)


@torch.no_grad()
def predicted(logits_KV: Tensor, labels_K: Tensor) -> Tensor:
    """How many labels (int64, scalar) have the largest logit of their row, or one of several that are as large."""
    return (logits_KV.gather(1, labels_K[:, None])[:, 0] == logits_KV.amax(1)).sum()


def preference(losses_P2: Tensor, reference_P2: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The DPO loss of pairs (Rafailov et al. 2023, equation 7), from the negative log-likelihoods of the chosen and the rejected answer
    (fp64, (P, 2)), those of the model and of the reference.

    Returns sums over the pairs (fp64, (4)): the loss, the rewards of the chosen and of the rejected answers, and how many margins are
    above 0; and the gradient of the loss in `losses_P2` (P, 2).
    """
    rewards_P2 = beta * (reference_P2 - losses_P2)
    margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    loss = -functional.logsigmoid(margin_P).sum()
    slope_P = beta * torch.sigmoid(-margin_P)
    sums = torch.stack((loss, *rewards_P2.sum(0).unbind(), (margin_P > 0).sum().double()))
    return sums, torch.stack((slope_P, -slope_P), 1)
