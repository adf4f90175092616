"""The losses that a session computes. Each is summed over its targets.

Letters: K targets, C candidates of a target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from coserve.core.errors import InvalidRequest
from coserve.core.training.settings import KtoLoss, PreferenceLoss
from coserve.data.corpus.batch import Batch
from coserve.finetune.packed_rows import TargetValues
from coserve.model.lora import LoraWeights


class CrossEntropy(Struct, frozen=True, tag=True):
    """-w p, with each target's weight w and log-probability p. Candidates (K, C) make it the cross-entropy of soft
    targets. A client computes any other loss L by weights of -dL/dp."""

    reads: ClassVar[tuple[str, ...]] = ("weights_K",)

    def __call__(self, p_K: Tensor, values: TargetValues) -> Tensor:
        return -_given(values.weights_K) * p_K


class ImportanceSampling(Struct, frozen=True, tag=True):
    """-r A with the ratio r = exp(p - q) of the probabilities now and at sampling, and the advantage A."""

    reads: ClassVar[tuple[str, ...]] = ("sampled_K", "advantages_K")

    def __call__(self, p_K: Tensor, values: TargetValues) -> Tensor:
        return -_ratio(p_K, values) * _given(values.advantages_K)


class Ppo(Struct, frozen=True, tag=True):
    """-min(r A, clip(r, low, high) A) (Schulman et al. 2017); `low` and `high` bound the ratio itself."""

    reads: ClassVar[tuple[str, ...]] = ("sampled_K", "advantages_K")
    low: float = 0.8
    high: float = 1.2

    def __call__(self, p_K: Tensor, values: TargetValues) -> Tensor:
        ratio_K, advantages_K = _ratio(p_K, values), _given(values.advantages_K)
        return -torch.minimum(ratio_K * advantages_K, ratio_K.clamp(self.low, self.high) * advantages_K)


class Cispo(Struct, frozen=True, tag=True):
    """-clip(r, low, high) p A, without a gradient through the clipped ratio (MiniMax-M1, arXiv 2506.13585). A positive
    `low` can let the policy run away from the sampler."""

    reads: ClassVar[tuple[str, ...]] = ("sampled_K", "advantages_K")
    low: float = 0.0
    high: float = 4.0

    def __call__(self, p_K: Tensor, values: TargetValues) -> Tensor:
        return -_ratio(p_K, values).clamp(self.low, self.high).detach() * p_K * _given(values.advantages_K)


class Dro(Struct, frozen=True, tag=True):
    """-(p A - beta / 2 (p - q)^2): direct reward optimisation (arXiv 2405.19107). A target with A = 0 is
    still pulled toward its probability at sampling, so give only sampled tokens as targets."""

    reads: ClassVar[tuple[str, ...]] = ("sampled_K", "advantages_K")
    beta: float = 0.05

    def __call__(self, p_K: Tensor, values: TargetValues) -> Tensor:
        off_K = p_K - _given(values.sampled_K)
        return 0.5 * self.beta * off_K.square() - p_K * _given(values.advantages_K)


class Gspo(Struct, frozen=True, tag=True):
    """-min(s A, clip(s, low, high) A): GSPO-token (arXiv 2507.18071, equations 13 to 17). The value of s is the
    geometric mean of the ratios r over those targets of the sequence that `ratio_mask` marks; its gradient is that of
    the target's own p. Default bounds: the paper's."""

    reads: ClassVar[tuple[str, ...]] = ("sampled_K", "advantages_K", "ratio_mask_K")
    low: float = 0.9997
    high: float = 1.0004

    def __call__(self, p_K: Tensor, values: TargetValues) -> Tensor:
        first_K, marked_K = _given(values.first_K), (_given(values.ratio_mask_K) != 0).to(p_K.dtype)
        off_K = (p_K.detach() - _given(values.sampled_K)) * marked_K
        sums_K, counts_K = (torch.zeros_like(off_K).index_add_(0, first_K, each) for each in (off_K, marked_K))
        ratio_K = ((sums_K / counts_K)[first_K] + p_K - p_K.detach()).exp()
        advantages_K = _given(values.advantages_K)
        return -torch.minimum(ratio_K * advantages_K, ratio_K.clamp(self.low, self.high) * advantages_K)


TokenLoss = CrossEntropy | ImportanceSampling | Ppo | Cispo | Dro | Gspo
"""A loss that is a function of the targets' log-probabilities p (nats) and of numbers given with them. A call returns
each target's loss (K), differentiable; `reads` names the fields of `Example` and `TargetValues` that it reads."""


@dataclass(frozen=True)
class Loss:
    """The negative log-likelihood of the targets, unless a field is set."""

    teacher: LoraWeights | None = None
    """The loss is KL(teacher || student) with this adapter as teacher: this rank's shard, in the base's dtype."""
    preference: PreferenceLoss | None = None
    """The loss is this one of pairs of rows, or of rows with a label."""
    reference: LoraWeights | None = None
    """Reference adapter of a DPO or KTO loss, in the same form as `teacher`; None: the base."""
    tokens: TokenLoss | None = None
    """The loss is this function of the targets' log-probabilities."""
    prepare: Callable[[], None] = lambda: None
    """Called in each micro-batch's first micro-step, on all ranks: completes what forwards read of the adapters."""

    @property
    def shares(self) -> bool:
        """Whether a forward may include rows of other sessions."""
        return self.teacher is None and self.preference is None and self.tokens is None

    @property
    def sums(self) -> int:
        """Number of sums of a forward: the loss and correct predictions, for pairs three more, for rows with a label
        four (`losses.chunked.Preference`)."""
        return 2 if self.preference is None else 6 if isinstance(self.preference, KtoLoss) else 5

    def check(self, batch: Batch, vocab: int) -> None:
        """Raise `InvalidRequest` unless a token loss can be computed on `batch`, whose rows come from a client."""
        reads = () if self.tokens is None else self.tokens.reads
        for example in batch.examples:
            example.check(vocab)
            missing = [name.removesuffix("_K") for name in reads if getattr(example, name) is None]
            if missing:
                raise InvalidRequest(f"expected {' and '.join(missing)} of each target")
            if example.labels_K.ndim > 1 and not isinstance(self.tokens, CrossEntropy):
                raise InvalidRequest("expected one label for each target: only cross-entropy takes several")
            if isinstance(self.tokens, Gspo) and not np.any(example.ratio_mask_K):
                raise InvalidRequest("expected ratio_mask to mark some of the targets, got only 0")


NLL = Loss()


def _given(values: Tensor | None) -> Tensor:
    assert values is not None, "expected a checked batch"
    return values


def _ratio(p_K: Tensor, values: TargetValues) -> Tensor:
    return (p_K - _given(values.sampled_K)).exp()
