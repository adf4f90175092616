"""Losses over chunks of logits, summed over the chunk, in nats. Logits may be this rank's part of the vocabulary.

Letters: K tokens whose next token is a target, V vocabulary, S tokens of a rank.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from coserve.parallel.vocabulary import VocabularyShard


def negative_log_likelihood(logits: Tensor, labels_K: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Of the labels (fp32, scalar). `logits`: (K, V), or (K, S) with a `shard`."""
    if shard is not None:
        return shard.cross_entropy(logits, labels_K)
    return functional.cross_entropy(logits.float(), labels_K, reduction="sum")


def divergence(logits: Tensor, teacher: Tensor, shard: VocabularyShard | None) -> Tensor:
    """The Kullback-Leibler divergence of the student's distributions from the teacher's (fp32, scalar): 0 where they are equal.

    Both are (K, V), or (K, S) with a `shard`, whose parts are gathered. Differentiable in `logits`.
    """
    if shard is not None:
        logits, teacher = shard.gather(logits), shard.gather(teacher)
    student_KV, teacher_KV = logits.float().log_softmax(-1), teacher.float().log_softmax(-1)
    return functional.kl_div(student_KV, teacher_KV, reduction="sum", log_target=True)
