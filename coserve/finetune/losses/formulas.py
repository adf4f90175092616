"""Losses of targets, in nats, from a chunk of logits, which become gradients in place: autograd would keep several fp32
tensors of their size. Logits may be this rank's part of the vocabulary.

Letters: K tokens whose next token is a target, V vocabulary, S tokens of a rank, P pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from coserve.kernels.gpu.launcher import launches
from coserve.kernels.losses import launch
from coserve.model.parallel.vocabulary import VocabularyShard

LARGEST_EXPONENT = 88.0
"""exp of it is finite in fp32, in which trackers keep values."""


def perplexity(loss: float) -> float:
    """exp of a mean negative log-likelihood in nats, at most exp(`LARGEST_EXPONENT`)."""
    return math.exp(min(loss, LARGEST_EXPONENT))


def negative_log_likelihood_(logits: Tensor, labels_K: Tensor, found_K2: Tensor, shard: VocabularyShard | None) -> None:
    """Write each label's negative log-likelihood into `found_K2[:, 0]` (fp64), and into `found_K2[:, 1]` 1 where the
    label has the largest logit of its row, or one of several that are as large, else 0. The logits become the gradient
    of the losses' sum in them.

    `logits`: (K, V), or (K, S) with a `shard`.
    """
    if shard is not None:
        shard.cross_entropy_(logits, labels_K, found_K2)
    elif launches(logits):
        launch.negative_log_likelihood_(logits, labels_K, found_K2)
    else:
        found_K2[:, 1] = _predicted(logits, labels_K)
        shares_KV = logits.float().log_softmax(-1)
        labels_K1 = labels_K[:, None]
        found_K2[:, 0] = -shares_KV.gather(1, labels_K1)[:, 0]
        shares_KV.exp_().scatter_add_(1, labels_K1, torch.full_like(labels_K1, -1, dtype=shares_KV.dtype))
        logits.copy_(shares_KV)


def divergence_(
    logits: Tensor, teacher: Tensor, labels_K: Tensor, found_K2: Tensor, shard: VocabularyShard | None
) -> None:
    """As `negative_log_likelihood_`; the loss is the Kullback-Leibler divergence of the student's distribution from the
    teacher's: 0 where they are equal.

    Both logits are (K, V), or (K, S) with a `shard`, whose parts are gathered.
    """
    if shard is not None:
        whole_KV = shard.gather(logits)
        divergence_(whole_KV, shard.gather(teacher), labels_K, found_K2, None)
        shard.take_(logits, whole_KV)
    elif launches(logits):
        launch.divergence_(logits, teacher, labels_K, found_K2)
    else:
        found_K2[:, 1] = _predicted(logits, labels_K)
        student_KV, teacher_KV = logits.float().log_softmax(-1), teacher.float().log_softmax(-1)
        found_K2[:, 0] = functional.kl_div(student_KV, teacher_KV, reduction="none", log_target=True).sum(1)
        logits.copy_(student_KV.exp_().sub_(teacher_KV.exp_()))


def _predicted(logits_KV: Tensor, labels_K: Tensor) -> Tensor:
    return logits_KV.gather(1, labels_K[:, None])[:, 0] == logits_KV.amax(1)


def preference(losses_P2: Tensor, reference_P2: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The DPO loss of pairs (Rafailov et al. 2023, equation 7), from the negative log-likelihoods of the chosen and the
    rejected answer (fp64, (P, 2)), those of the model and of the reference.

    Returns sums over the pairs (fp64, (4)): the loss, the rewards of the chosen and of the rejected answers, and how
    many margins are above 0; and the gradient of the loss in `losses_P2` (P, 2).
    """
    rewards_P2 = beta * (reference_P2 - losses_P2)
    margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    loss = -functional.logsigmoid(margin_P).sum()
    slope_P = beta * torch.sigmoid(-margin_P)
    sums = torch.stack((loss, *rewards_P2.sum(0).unbind(), (margin_P > 0).sum().double()))
    return sums, torch.stack((slope_P, -slope_P), 1)
