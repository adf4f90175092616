"""Attention of steps in fixed device buffers, for CUDA graphs: the graph keeps the addresses, `load` the contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.attention import PagedAttention, Pages, StepAttention
from coserve.kernels.tiles import Run


class StaticPagedAttention(StepAttention, Protocol):
    """Attention of steps in which each of at most `batch` sequences has one new token; T = `batch`.

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


class _Gathered:
    """Attention of a step's real rows through plain torch, and zeros for padding: for devices that capture nothing."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._take((), 0)

    def _take(self, runs: Sequence[Run], rows: int) -> None:
        """The next step, and its real rows."""
        self._rows, self._inner = rows, PagedAttention(self._pages, runs)

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
        """See `StepAttention`."""
        heads, rows, width = q_HTD.shape
        if not self._rows:
            return q_HTD.new_zeros(rows, heads, width)
        q, k, v = (x[:, : self._rows] for x in (q_HTD, k_KTD, v_KTD))
        out = self._inner.attend(layer, q, k, v, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
        return pad(out, (0, 0, 0, 0, 0, rows - self._rows))


class GatheredStaticAttention(_Gathered):
    """`StaticPagedAttention` on such devices."""

    def __init__(self, pages: Pages, *, batch: int, max_tokens: int) -> None:
        super().__init__(pages)
        self.batch, self.max_tokens = batch, max_tokens
        self.positions = torch.zeros(batch, dtype=torch.int64, device=pages.keys[0].device)

    def load(self, runs: Sequence[Run]) -> None:
        assert len(runs) <= self.batch, f"expected at most {self.batch} sequences, got {len(runs)}"
        assert all(run.tokens == 1 for run in runs), "expected one new token a sequence"
        host = torch.zeros(self.batch, dtype=torch.int64)
        host[: len(runs)] = torch.tensor([run.position for run in runs], dtype=torch.int64)
        self.positions.copy_(host)
        self._take(runs, len(runs))


@dataclass(frozen=True)
class MixedRoom:
    """What a graph of steps of any mix has room for."""

    tokens: int
    """T: rows of the step; those behind the last run are padding."""
    sequences: int
    chunks: int
    """Sequences with more than one new token."""
    context: int
    """Longest, the new tokens included."""

    def holds(self, runs: Sequence[Run]) -> bool:
        return (
            len(runs) <= self.sequences
            and sum(run.tokens for run in runs) <= self.tokens
            and sum(run.tokens > 1 for run in runs) <= self.chunks
            and all(run.position + run.tokens <= self.context for run in runs)
        )


class MixedAttention(StepAttention, Protocol):
    """Attention of steps of any mix, decodes and chunks of prompts, within a `MixedRoom`; T = `room.tokens`.

    Used as `StaticPagedAttention` is. Runs follow each other from row 0 on; rows behind the last are padding: nothing is
    written for them and they get zeros. Grids and addresses depend on the room alone.
    """

    room: MixedRoom

    def load(self, runs: Sequence[Run]) -> None:
        """What the next step attends to; the room holds it. Copies in stream order, and does not wait for the device."""
        ...


class GatheredMixedAttention(_Gathered):
    """`MixedAttention` on such devices."""

    def __init__(self, pages: Pages, room: MixedRoom) -> None:
        super().__init__(pages)
        self.room = room

    def load(self, runs: Sequence[Run]) -> None:
        assert self.room.holds(runs), "expected a step that the room holds"
        self._take(runs, sum(run.tokens for run in runs))
