"""Attention of steps in fixed device buffers, with the interface that CUDA graphs need, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.attention.interface import (
    AttentionParams,
    MixedCapacity,
    Pages,
    TokenRun,
)
from coserve.kernels.attention.torch_paged.paged import PagedAttention


class _Gathered:
    """Attention of a step's real rows in plain torch, and zeros for padding. For devices without CUDA graphs."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._take((), 0)

    def _take(self, runs: Sequence[TokenRun], rows: int) -> None:
        """Set the next step's runs. `rows`: how many of its rows are real."""
        self._rows, self._inner = rows, PagedAttention(self._pages, runs)

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        """See `Attention`."""
        heads, rows, _ = q_HTD.shape
        if not self._rows:
            return q_HTD.new_zeros(rows, heads, v_KTD.shape[2])
        q, k, v = (x[:, : self._rows] for x in (q_HTD, k_KTD, v_KTD))
        out = self._inner.attend(layer, q, k, v, params)
        return pad(out, (0, 0, 0, 0, 0, rows - self._rows))


class GatheredStaticAttention(_Gathered):
    """`StaticPagedAttention` in plain torch."""

    def __init__(self, pages: Pages, *, batch: int, max_tokens: int) -> None:
        super().__init__(pages)
        self.batch, self.max_tokens = batch, max_tokens
        self.positions = torch.zeros(batch, dtype=torch.int64, device=pages.keys[0].device)

    def load(self, runs: Sequence[TokenRun]) -> None:
        assert len(runs) <= self.batch, f"expected at most {self.batch} sequences, got {len(runs)}"
        assert all(run.tokens == 1 for run in runs), "expected one new token a sequence"
        host = torch.zeros(self.batch, dtype=torch.int64)
        host[: len(runs)] = torch.tensor([run.position for run in runs], dtype=torch.int64)
        self.positions.copy_(host)
        self._take(runs, len(runs))


class GatheredMixedAttention(_Gathered):
    """`MixedAttention` in plain torch."""

    def __init__(self, pages: Pages, capacity: MixedCapacity) -> None:
        super().__init__(pages)
        self.capacity = capacity

    def load(self, runs: Sequence[TokenRun]) -> None:
        assert self.capacity.holds(runs), "expected a step that the capacity holds"
        self._take(runs, sum(run.tokens for run in runs))
