"""Attention of a batch with padding in its last rows."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.attention.expanded import expanded_of
from coserve.kernels.attention.interface import Attention, AttentionParams, reads_pages
from coserve.kernels.recurrent.interface import Recurrence
from coserve.kernels.recurrent.wrappers import PaddedRecurrence, recurrence_of


class PaddedAttention:
    """An `Attention` for a batch with padding in its last rows: `inner` does not see them, and their output is zero."""

    def __init__(self, inner: Attention, tokens: int) -> None:
        """`tokens`: how many of the rows are real."""
        self._inner, self._tokens = inner, tokens
        self.reads_pages, self.expanded = reads_pages(inner), expanded_of(inner)

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> Tensor:
        heads, rows, _ = q_HTD.shape
        if not self._tokens:
            return q_HTD.new_zeros(rows, heads, v_KTD.shape[2])
        q, k, v = (x[:, : self._tokens] for x in (q_HTD, k_KTD, v_KTD))
        return pad(self._inner.attend(layer, q, k, v, params), (0, 0, 0, 0, 0, rows - self._tokens))

    @property
    def recurrence(self) -> Recurrence:
        return PaddedRecurrence(recurrence_of(self._inner), self._tokens)
