"""The vocabulary partitioned among the ranks: each computes the logits of its own tokens.

Letters: B rows, V tokens of the vocabulary, S tokens of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from coserve.kernels.sampling.constants import NOT_FINITE
from coserve.parallel.functions import gather_columns
from coserve.parallel.mesh import Mesh


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """This rank's tokens: S of them from `start`. The last rank's may reach beyond V, and their logits mean nothing."""

    mesh: Mesh
    size: int
    """V."""

    @property
    def local(self) -> int:
        """S."""
        return -(-self.size // self.mesh.size)

    @property
    def start(self) -> int:
        return min(self.mesh.rank * self.local, self.size)

    @property
    def stop(self) -> int:
        """Of the tokens that exist."""
        return min(self.start + self.local, self.size)

    def gather(self, logits_BS: Tensor) -> Tensor:
        """(B, V): the same on every rank. Differentiable, for losses that every rank computes alike."""
        return gather_columns(logits_BS, self.mesh)[..., : self.size]

    def cross_entropy(self, logits_KS: Tensor, labels_K: Tensor) -> tuple[Tensor, Tensor]:
        """The negative log-likelihood of each label (fp32, (K), nats), differentiable in the logits, and how many labels have the
        largest logit (int64, scalar). On every rank.

        The ranks exchange 12 bytes a label, instead of logits.
        """
        start, stop = self.start, self.stop
        found: tuple[Tensor, Tensor] = _CrossEntropy.apply(logits_KS[:, : stop - start], labels_K - start, self.mesh)  # type: ignore[no-untyped-call]
        return found

    def likeliest(self, logits_BS: Tensor) -> Tensor:
        """int64 (B): the first token of the highest logit of all ranks; `NOT_FINITE` where a row has no finite maximum.

        The ranks exchange 16 bytes a row.
        """
        value, token = logits_BS[:, : max(1, self.stop - self.start)].max(-1)
        value, token = value.double(), (token + self.start).double()
        if self.start >= self.size:
            value = torch.full_like(value, -torch.inf)
        values, tokens = self.mesh.all_gather(torch.stack((value, token), 1)[None], 0).unbind(2)
        best = values.amax(0)
        first = tokens.masked_fill(values != best, torch.inf).amin(0)
        return torch.where(best.isfinite(), first, NOT_FINITE).long()


class _CrossEntropy(Function):
    """The ranks agree on each row's maximum, its sum of exponentials and its label's logit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - torch's own signature
        """`labels`: columns of `logits`; those of other ranks lie outside."""
        logits_KS = logits.float()
        width = logits_KS.shape[1]
        own_K = (labels >= 0) & (labels < width)
        highest_K = logits_KS.amax(1) if width else logits_KS.new_full((len(labels),), -torch.inf)
        highest_K = mesh.all_gather(highest_K[None], 0).amax(0)
        shifted_KS = logits_KS - highest_K[:, None]
        at_K = labels.clamp(0, max(width - 1, 0))
        label_K = (
            shifted_KS.gather(1, at_K[:, None])[:, 0].masked_fill(~own_K, 0.0) if width else torch.zeros_like(highest_K)
        )
        exponentials_KS = shifted_KS.exp_()
        sum_K, label_K = mesh.all_reduce(torch.stack((exponentials_KS.sum(1), label_K))).unbind(0)
        ctx.save_for_backward(exponentials_KS.div_(sum_K[:, None]), at_K, own_K)
        ctx.dtype = logits.dtype
        predicted = (label_K == 0).sum()
        ctx.mark_non_differentiable(predicted)
        return sum_K.log() - label_K, predicted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None, None]:  # noqa: ANN401 - torch's own signature
        shares_KS, at_K, own_K = ctx.saved_tensors
        if shares_KS.shape[1]:
            shares_KS.scatter_add_(1, at_K[:, None], -own_K[:, None].to(shares_KS.dtype))
        return (shares_KS * gradient[:, None]).to(ctx.dtype), None, None
