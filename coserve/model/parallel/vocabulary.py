"""The vocabulary partitioned among tensor-parallel ranks: each computes the logits of its own tokens.

Letters: B rows, V tokens of the vocabulary, S tokens of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.sampling.constants import NOT_FINITE
from coserve.model.parallel.functions import gather_columns
from coserve.model.parallel.mesh import Mesh


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """This rank's tokens: S of them from `start`. The last rank's may reach beyond V; the logits there are
    meaningless."""

    mesh: Mesh
    size: int
    """V: tokens of the vocabulary."""

    @property
    def local(self) -> int:
        """S: tokens of a rank."""
        return -(-self.size // self.mesh.size)

    @property
    def start(self) -> int:
        return min(self.mesh.rank * self.local, self.size)

    @property
    def stop(self) -> int:
        """End of this rank's tokens, capped at V."""
        return min(self.start + self.local, self.size)

    def gather(self, logits_BS: Tensor) -> Tensor:
        """Return all logits (B, V), equal on every rank. Differentiable, for losses that every rank computes alike."""
        return gather_columns(logits_BS, self.mesh)[..., : self.size]

    def take_(self, logits_BS: Tensor, gathered_BV: Tensor) -> None:
        """Copy this rank's columns of gathered rows into `logits_BS`, with 0 for tokens beyond V."""
        width = self.stop - self.start
        logits_BS[:, :width] = gathered_BV[:, self.start : self.stop]
        logits_BS[:, width:] = 0

    def cross_entropy_(self, logits_KS: Tensor, labels_K: Tensor, found_K2: Tensor) -> None:
        """Write each label's negative log-likelihood (nats) into `found_K2[:, 0]` (fp64), and overwrite the logits by
        gradients.

        `found_K2[:, 1]` becomes 1 if the label has the largest logit, else 0. All ranks get both. The gradients are
        those of the sum of the losses. The ranks exchange 12 bytes per label instead of logits: each row's maximum, its
        sum of exponentials and its label's logit.
        """
        width, mesh = self.stop - self.start, self.mesh
        shares_KS, at_K = logits_KS[:, :width].float(), labels_K - self.start
        own_K = (at_K >= 0) & (at_K < width)
        highest_K = shares_KS.amax(1) if width else shares_KS.new_full((len(at_K),), -torch.inf)
        shares_KS -= mesh.all_gather(highest_K[None], 0).amax(0)[:, None]
        at_K1 = at_K.clamp(0, max(width - 1, 0))[:, None]
        label_K = shares_KS.gather(1, at_K1)[:, 0].masked_fill(~own_K, 0.0) if width else torch.zeros_like(highest_K)
        shares_KS.exp_()
        sum_K, label_K = mesh.all_reduce(torch.stack((shares_KS.sum(1), label_K))).unbind(0)
        found_K2[:, 0], found_K2[:, 1] = sum_K.log() - label_K, label_K == 0
        shares_KS /= sum_K[:, None]
        if width:
            shares_KS.scatter_add_(1, at_K1, -own_K[:, None].to(shares_KS.dtype))
        logits_KS[:, :width] = shares_KS
        logits_KS[:, width:] = 0

    def likeliest(self, logits_BS: Tensor) -> Tensor:
        """Return the argmax over all ranks, the lowest id among equals: int64 (B); `NOT_FINITE` for rows without a
        finite maximum.

        The ranks exchange 16 bytes per row.
        """
        value, token = logits_BS[:, : max(1, self.stop - self.start)].max(-1)
        value, token = value.double(), (token + self.start).double()
        if self.start >= self.size:
            value = torch.full_like(value, -torch.inf)
        values, tokens = self.mesh.all_gather(torch.stack((value, token), 1)[None], 0).unbind(2)
        best = values.amax(0)
        first = tokens.masked_fill(values != best, torch.inf).amin(0)
        return torch.where(best.isfinite(), first, NOT_FINITE).long()
