"""The vocabulary cut among the ranks: each computes the logits of its own tokens.

Letters: B rows, V tokens of the vocabulary, S tokens of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
