"""Attention of decode steps in fixed device buffers, for CUDA graphs: the graph keeps the addresses, `load` the contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.attention import PagedAttention, Pages
from coserve.kernels.tiles import Run


class StaticPagedAttention(Protocol):
    """Attention of steps in which each of at most `batch` sequences has one new token: an `Attention`.

    Use: `load(runs)` (any runs), warm up a forward over `batch` rows with it, capture that forward; then, for each step,
    `load(runs)` on the stream of the graph and replay. Row i of q, k and v belongs to `runs[i]`; rows behind the last
    run are padding: nothing is written for them and they get zeros. Grids and addresses depend on `batch` and
    `max_tokens` alone, so a graph is right for any contexts up to `max_tokens`. `attend` never waits for the device.
    """

    batch: int
    max_tokens: int
    positions: Tensor
    """int64 (batch), device: the position of each row's token, 0 for padding. Filled by `load`; what the base takes."""

    def load(self, runs: Sequence[Run]) -> None:
        """What the next step attends to. One pinned copy to the device on the current stream; does not wait for it.

        Each run has one token; `run.pages` holds its position too. Callers may load the next step while the device still
        runs the last one: the copy takes its place in the stream.
        """
        ...

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """As `PackedAttention.attend`, over each sequence's whole context: (T, H, D), T = `batch`."""
        ...


class GatheredStaticAttention:
    """`StaticPagedAttention` through plain torch: for devices that capture nothing."""

    def __init__(self, pages: Pages, *, batch: int, max_tokens: int) -> None:
        self.batch, self.max_tokens = batch, max_tokens
        self.positions = torch.zeros(batch, dtype=torch.int64, device=pages.keys[0].device)
        self._pages, self._rows, self._inner = pages, 0, PagedAttention(pages, ())

    def load(self, runs: Sequence[Run]) -> None:
        assert len(runs) <= self.batch, f"expected at most {self.batch} sequences, got {len(runs)}"
        assert all(run.tokens == 1 for run in runs), "expected one new token a sequence"
        host = torch.zeros(self.batch, dtype=torch.int64)
        host[: len(runs)] = torch.tensor([run.position for run in runs], dtype=torch.int64)
        self.positions.copy_(host)
        self._rows, self._inner = len(runs), PagedAttention(self._pages, runs)

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        heads, rows, width = q_HTD.shape
        if not self._rows:
            return q_HTD.new_zeros(rows, heads, width)
        q, k, v = (x[:, : self._rows] for x in (q_HTD, k_KTD, v_KTD))
        out = self._inner.attend(layer, q, k, v, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
        return pad(out, (0, 0, 0, 0, 0, rows - self._rows))
