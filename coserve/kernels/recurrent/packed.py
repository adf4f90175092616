"""Recurrent layers over packed sequences that all begin in the batch, for training and checks; differentiable.

Letters: see `interface`; B sequences, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from coserve.kernels.recurrent.interface import RecurrenceInputs
from coserve.kernels.recurrent.reference import CHUNK, by_tokens, in_chunks, prepared, tapped


class PackedRecurrence:
    """Implements `Recurrence` without states before or behind the batch.

    `bounds` (S + 1) ascends from 0 to the number of rows; sequence s is the rows `[bounds[s], bounds[s + 1])`.
    Sequences with equal numbers of chunks are computed together.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self._spans = [(start, end) for start, end in pairwise(bounds) if end > start]
        self._rows = bounds[-1]
        self._taps: dict[tuple[int, torch.device], Tensor] = {}
        self._batches: dict[torch.device, tuple[list[Tensor], Tensor]] = {}

    def convolve(
        self, layer: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
    ) -> Tensor:
        """See `Recurrence.convolve`."""
        taps_TW = self._taps_on(x_TC.device, weight_CW.shape[1])
        return tapped(torch.cat((x_TC, x_TC.new_zeros(1, x_TC.shape[1]))), taps_TW, weight_CW, bias_C, activation)

    def recur(self, layer: int, given: RecurrenceInputs) -> Tensor:
        """See `Recurrence.recur`. Only the inputs are kept for the backward, as the fp32 tensors of all chunks take
        several times the memory of the rest of a layer."""
        if torch.is_grad_enabled() and given.v.requires_grad:
            out: Tensor = checkpoint(self._recur, given, use_reentrant=False, preserve_rng_state=False)
            return out
        return self._recur(given)

    def _recur(self, given: RecurrenceInputs) -> Tensor:
        every = prepared(given)
        compute = in_chunks if given.decay.dim() == 2 else by_tokens
        batches, back_T = self._batches_on(given.v.device)
        outputs = []
        for rows_BL in batches:
            state_BHKV = every.v.new_zeros(len(rows_BL), *every.k.shape[1:], given.v.shape[2])
            outputs.append(compute(every.rows(partial(_at, rows_BL)), state_BHKV)[0].flatten(0, 1))
        return torch.cat(outputs).index_select(0, back_T).to(given.v.dtype)

    def _taps_on(self, device: torch.device, width: int) -> Tensor:
        """The rows (T, W) that each token's convolution reads; row T holds zeros."""
        if (width, device) not in self._taps:
            starts = torch.cat([torch.full((end - start,), start) for start, end in self._spans])
            taps = torch.arange(self._rows)[:, None] + torch.arange(1 - width, 1)
            self._taps[width, device] = taps.where(taps >= starts[:, None], self._rows).to(device)
        return self._taps[width, device]

    def _batches_on(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """The rows (B, L) of the sequences of each number of chunks, the last row repeated where one is shorter, and
        the place of each row's output in the batches' outputs."""
        if device not in self._batches:
            sizes: dict[int, list[tuple[int, int]]] = {}
            for start, end in self._spans:
                sizes.setdefault(-(-(end - start) // CHUNK), []).append((start, end))
            batches, back, first = [], torch.zeros(self._rows, dtype=torch.long), 0
            for spans in sizes.values():
                longest = max(end - start for start, end in spans)
                for number, (start, end) in enumerate(spans):
                    back[start:end] = first + number * longest + torch.arange(end - start)
                first += len(spans) * longest
                rows = [torch.arange(start, start + longest).clamp_max(end - 1) for start, end in spans]
                batches.append(torch.stack(rows).to(device))
            self._batches[device] = batches, back.to(device)
        return self._batches[device]


def _at(rows_BL: Tensor, x: Tensor) -> Tensor:
    return x[rows_BL]
