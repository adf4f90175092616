"""Packed attention in CUDA graphs: one captured launch serves every batch with the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from coserve.kernels.attention.interface import AttentionParams
from coserve.kernels.attention.packed import PackedAttention, one_kernel
from coserve.kernels.gpu.device import put
from coserve.kernels.gpu.rounding import next_power_of_2
from coserve.kernels.recurrent.fixed import FixedRecurrence

FEWEST_SEQUENCES, SHORTEST = 4, 128
"""Lower bounds of `limits`, sequences and tokens of the longest one: smaller batches share one graph."""


class FixedAttention(PackedAttention):
    """Packed attention for up to a fixed number of sequences of up to a fixed length, without autograd.

    `bounds` lie at a fixed device address.
    """

    def __init__(self, bounds: Sequence[int], device: torch.device) -> None:
        super().__init__(bounds)
        self._most, self._longest = limits(bounds)
        self.recurrence: FixedRecurrence = FixedRecurrence(self._bounds, self._most, device)
        self._on_device[device] = torch.zeros(self._most + 1, dtype=torch.int32, device=device)
        self._device = device
        self.capturable = True
        """Whether all launches so far serve any batch. A loop over sequences does not, as its launches depend on the
        batch."""
        self._load()

    def take(self, bounds: Sequence[int]) -> None:
        """Switch to another batch, in stream order. It must have the same number of tokens and the same `limits`."""
        if tuple(bounds) != self._bounds:
            self._bounds = tuple(bounds)
            self._chunks.clear()
            self.recurrence.take(self._bounds)
            self._load()

    def attend_keeping(
        self, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams
    ) -> tuple[Tensor, Tensor | None]:
        chunks = params.chunked and params.window is not None and self._longest > params.window
        self.capturable &= not chunks and (one_kernel(q_HTD, v_KTD, params) or not q_HTD.is_cuda)
        return super().attend_keeping(q_HTD, k_KTD, v_KTD, params)

    def _load(self) -> None:
        missing = self._most + 1 - len(self._bounds)
        host = torch.tensor([*self._bounds, *[self._bounds[-1]] * missing], dtype=torch.int32)
        put(host, self._on_device[self._device])


def limits(bounds: Sequence[int]) -> tuple[int, int]:
    """Return the most sequences and the greatest length that graphs for this batch serve: powers of two, capped at the
    number of tokens."""
    longest = max(b - a for a, b in pairwise(bounds))
    most = max(FEWEST_SEQUENCES, next_power_of_2(len(bounds) - 1))
    return most, min(max(SHORTEST, next_power_of_2(longest)), bounds[-1])
