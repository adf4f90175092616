"""Launches of the loss kernels. Gradients overwrite logits, so nothing of their size is allocated.

Letters: K targets, C candidates of a target, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from coserve.kernels.gpu.launcher import Launcher
from coserve.kernels.losses import kernels

BLOCK = 2048
"""Logits that a program reads at once."""
WARPS = 8

_likelihood, _divergence = Launcher(kernels.likelihood), Launcher(kernels.divergence)
_soft_cross_entropy = Launcher(kernels.soft_cross_entropy)


def negative_log_likelihood_(
    logits_KV: Tensor, labels_K: Tensor, found_K2: Tensor, *, block: int = BLOCK, warps: int = WARPS
) -> None:
    """Write each row's -log softmax(logits)[label] (nats) into `found_K2[:, 0]`, and overwrite the logits by gradients.

    `found_K2[:, 1]` becomes 1 where the label has the row's largest logit, else 0. The gradients are those of the sum
    of the losses. `logits_KV`: any float dtype, rows may have gaps; `labels_K`: int64; `found_K2`: fp64.
    """
    _check(logits_KV, labels_K, found_K2)
    _likelihood(
        (logits_KV.shape[0], 1, 1),
        (logits_KV, labels_K, found_K2),
        (logits_KV.stride(0), logits_KV.shape[1]),
        BLOCK=block,
        num_warps=warps,
    )


def soft_cross_entropy_(
    logits_KV: Tensor,
    labels_KC: Tensor,
    weights_KC: Tensor,
    found_KC: Tensor,
    *,
    block: int = BLOCK,
    warps: int = WARPS,
) -> None:
    """Write each candidate's -log softmax(logits)[label] (nats) into the first C columns of `found_KC` (fp64,
    (K, C + 1)), and into the last 1 where the first candidate has the row's largest logit, else 0.

    The logits become the gradient of the sum of `weights_KC` (fp32) times these values. `labels_KC`: int64; -1, once in
    a row, stands for all tokens that are no candidate of the row with a weight; no other label is then twice with one.
    """
    rows, candidates = labels_KC.shape
    assert logits_KV.stride(1) == 1 and rows == logits_KV.shape[0], "expected the logits of a row side by side"
    assert weights_KC.shape == labels_KC.shape and found_KC.shape == (rows, candidates + 1)
    assert labels_KC.is_contiguous() and weights_KC.is_contiguous() and found_KC.is_contiguous()
    _soft_cross_entropy(
        (rows, 1, 1),
        (logits_KV, labels_KC, weights_KC, found_KC),
        (logits_KV.stride(0), logits_KV.shape[1], candidates),
        BLOCK=block,
        num_warps=warps,
    )


def divergence_(
    logits_KV: Tensor,
    teacher_KV: Tensor,
    labels_K: Tensor,
    found_K2: Tensor,
    *,
    block: int = BLOCK,
    warps: int = WARPS,
) -> None:
    """Like `negative_log_likelihood_`, but the loss is the Kullback-Leibler divergence KL(softmax(teacher) ||
    softmax(logits))."""
    _check(logits_KV, labels_K, found_K2)
    assert teacher_KV.shape == logits_KV.shape and teacher_KV.stride(1) == 1, (
        "expected a teacher's logits of the same rows"
    )
    _divergence(
        (logits_KV.shape[0], 1, 1),
        (logits_KV, teacher_KV, labels_K, found_K2),
        (logits_KV.stride(0), teacher_KV.stride(0), logits_KV.shape[1]),
        BLOCK=block,
        num_warps=warps,
    )


def _check(logits_KV: Tensor, labels_K: Tensor, found_K2: Tensor) -> None:
    assert logits_KV.stride(1) == 1, "expected the logits of a row side by side"
    assert found_K2.is_contiguous() and found_K2.shape == (logits_KV.shape[0], 2), (
        "expected a row of two for each target"
    )
    assert labels_K.is_contiguous() and labels_K.shape == logits_KV.shape[:1], "expected a label for each row"
