"""Losses of targets, in nats, from a chunk of logits. The logits become gradients in place: autograd would keep several
fp32 tensors of their size. They may be this rank's vocabulary shard.

Letters: K tokens whose next token is a target, C candidates of a target, V vocabulary, S vocabulary entries of a rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from coserve.kernels.gpu.launcher import launches
from coserve.kernels.losses import launch
from coserve.kernels.losses.kernels import LEAST_OUTSIDE
from coserve.model.parallel.vocabulary import VocabularyShard

LARGEST_EXPONENT = 88.0
"""exp of it is finite in fp32, the dtype of tracked metrics."""


def perplexity(loss: float) -> float:
    """exp of a mean negative log-likelihood in nats, at most exp(`LARGEST_EXPONENT`)."""
    return math.exp(min(loss, LARGEST_EXPONENT))


def negative_log_likelihood_(logits: Tensor, labels_K: Tensor, found_K2: Tensor, shard: VocabularyShard | None) -> None:
    """Write each label's negative log-likelihood into `found_K2[:, 0]` (fp64), and into `found_K2[:, 1]` 1 if the label
    has the largest logit of its row (ties count), else 0. The logits become the gradient of the summed loss.

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


def soft_cross_entropy_(
    logits: Tensor, labels_KC: Tensor, weights_KC: Tensor, found_KC: Tensor, shard: VocabularyShard | None
) -> None:
    """Write each candidate's negative log-likelihood into the first C columns of `found_KC` (fp64, (K, C + 1)), and 1
    into the last if the first candidate has the largest logit of its row. The logits become the gradient of the sum of
    `weights_KC` (fp32) times these values. A label of -1, once in a row, stands for all tokens that are no candidate of
    the row with a weight.

    `logits`: (K, V), or (K, S) with a `shard`, whose shards are gathered.
    """
    if shard is not None:
        whole_KV = shard.gather(logits)
        soft_cross_entropy_(whole_KV, labels_KC, weights_KC, found_KC, None)
        shard.take_(logits, whole_KV)
    elif launches(logits):
        launch.soft_cross_entropy_(logits, labels_KC, weights_KC, found_KC)
    else:
        found_KC[:, -1] = _predicted(logits, labels_KC[:, 0])
        shares_KV, rest_KC, tokens_KC = logits.float().log_softmax(-1), labels_KC < 0, labels_KC.clamp(min=0)
        losses_KC, own_KC = -shares_KV.gather(1, tokens_KC), weights_KC.masked_fill(rest_KC, 0)
        candidates_KC = (own_KC != 0).to(losses_KC.dtype)
        inside_K1 = (losses_KC.neg().exp() * candidates_KC).sum(1, keepdim=True)
        outside_K1 = (1 - inside_K1).clamp(min=LEAST_OUTSIDE.value)
        found_KC[:, :-1] = torch.where(rest_KC, -outside_K1.log(), losses_KC)
        rest_K1 = (weights_KC - own_KC).sum(1, keepdim=True)
        candidates_KV = torch.zeros_like(shares_KV).scatter_add_(1, tokens_KC, candidates_KC) > 0
        factors_KV = torch.where(candidates_KV, rest_K1, -rest_K1 * inside_K1 / outside_K1)
        factors_KV += own_KC.sum(1, keepdim=True)
        logits.copy_(shares_KV.exp_().mul_(factors_KV).scatter_add_(1, tokens_KC, -own_KC))


def divergence_(
    logits: Tensor, teacher: Tensor, labels_K: Tensor, found_K2: Tensor, shard: VocabularyShard | None
) -> None:
    """Like `negative_log_likelihood_`, with KL(teacher || student) as the loss: 0 where the distributions are equal.

    Both logits are (K, V), or (K, S) with a `shard`, whose shards are gathered.
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
