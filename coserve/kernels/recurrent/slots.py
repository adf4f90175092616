"""Recurrent layers of a generation step, whose sequences' states lie in slots.

Letters: see `interface`; B sequences of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.recurrent.interface import RecurrenceInputs
from coserve.kernels.recurrent.reference import one_token, prepared, tapped
from coserve.kernels.recurrent.wrappers import PaddedRecurrence


@dataclass(frozen=True)
class LayerStates:
    """One layer's states in S slots, and in two more. Slot S stays zero: new sequences read it. Padding writes slot S +
    1."""

    conv: Tensor
    """(S + 2, W - 1, C), oldest input first, in the base's dtype."""
    recurrent: Tensor
    """(S + 2, H, K, V), fp32."""


class SlotRecurrence:
    """Implements `Recurrence` in plain torch for one step: reads and writes the states of its sequences.

    Built once a step. Token by token: a token's bits do not depend on the batch, nor on how its sequence was cut into
    steps.
    """

    def __init__(self, states: Mapping[int, LayerStates], runs: Sequence[TokenRun], device: torch.device) -> None:
        self._states, self._device = states, device
        blank = next(iter(states.values())).conv.shape[0] - 2
        starts = torch.tensor([0, *[run.tokens for run in runs]]).cumsum(0)[:-1]
        order = sorted(range(len(runs)), key=lambda i: -runs[i].tokens)  # those that still have tokens come first
        self._runs = [runs[i] for i in order]
        self._starts = starts[order]
        self._from = self._placed([run.slot if run.position else blank for run in self._runs])
        self._to = self._placed([run.slot for run in self._runs])
        lengths = [run.tokens for run in self._runs]
        self._steps = [
            (self._starts[:active] + t).to(device)
            for t in range(lengths[0] if lengths else 0)
            if (active := sum(length > t for length in lengths))
        ]
        """The rows of the sequences' first tokens, of their second ones, and so on."""
        self._taps: dict[int, tuple[Tensor, Tensor]] = {}

    def _placed(self, slots: list[int]) -> Tensor:
        assert all(slot >= 0 for slot in slots), "expected sequences with slots"
        return torch.tensor(slots, dtype=torch.long).to(self._device)

    def convolve(
        self, layer: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
    ) -> Tensor:
        taps_TW, last_BW = self._taps_of(weight_CW.shape[1], x_TC.shape[0])
        states = self._states[layer].conv
        rows = torch.cat((states.index_select(0, self._from).flatten(0, 1), x_TC.to(states.dtype)))
        states.index_copy_(0, self._to, rows[last_BW])
        return tapped(rows, taps_TW, weight_CW, bias_C, activation).to(x_TC.dtype)

    def recur(self, layer: int, given: RecurrenceInputs) -> Tensor:
        states = self._states[layer].recurrent
        state, out_THV = states.index_select(0, self._from), torch.zeros_like(given.v)
        every = prepared(given)
        for rows in self._steps:
            out, state[: len(rows)] = one_token(
                every.rows(partial(torch.index_select, dim=0, index=rows)), state[: len(rows)]
            )
            out_THV[rows] = out.to(given.v.dtype)
        states.index_copy_(0, self._to, state)
        return out_THV

    def _taps_of(self, width: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the rows that each token's convolution reads (T, W), and the last W - 1 rows of each sequence (B, W -
        1). Rows count the sequences' states, one after another, and then the step's inputs."""
        if width not in self._taps:
            before, taps = width - 1, torch.zeros(tokens, width, dtype=torch.long)
            last = torch.zeros(len(self._runs), before, dtype=torch.long)
            first = before * len(self._runs)
            for i, (run, start) in enumerate(zip(self._runs, self._starts.tolist(), strict=True)):
                rows = torch.cat((i * before + torch.arange(before), first + start + torch.arange(run.tokens)))
                taps[start : start + run.tokens] = rows.unfold(0, width, 1)
                last[i] = rows[len(rows) - before :]
            self._taps[width] = taps.to(self._device), last.to(self._device)
        return self._taps[width]


class GatheredRecurrence(PaddedRecurrence):
    """`StaticRecurrence` in plain torch, for devices without CUDA graphs."""

    def __init__(self, states: Mapping[int, LayerStates], device: torch.device) -> None:
        self._states, self._device = states, device
        self.load(())

    def load(self, runs: Sequence[TokenRun]) -> None:
        """See `StaticRecurrence.load`."""
        self._inner, self._tokens = SlotRecurrence(self._states, runs, self._device), sum(run.tokens for run in runs)
