"""Wrappers of a `Recurrence`, for padded and for reversed batches, and attention paired with a recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.attention.expanded import expanded_of
from coserve.kernels.attention.interface import Attention, MixedAttention, StaticPagedAttention, TokenRun
from coserve.kernels.recurrent.interface import (
    HasRecurrence,
    Recurrence,
    RecurrenceInputs,
    StateShape,
    StaticRecurrence,
)


def recurrence_of(attention: Attention) -> Recurrence:
    """Return the recurrence that comes with an attention."""
    assert isinstance(attention, HasRecurrence), f"{type(attention).__name__} has no recurrence"
    return attention.recurrence


class PaddedRecurrence:
    """A `Recurrence` for a batch with padding in its last rows: `inner` does not see them, and their output is zero."""

    def __init__(self, inner: Recurrence, tokens: int) -> None:
        self._inner, self._tokens = inner, tokens

    def convolve(
        self, layer: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
    ) -> Tensor:
        out_TC = self._inner.convolve(layer, x_TC[: self._tokens], weight_CW, bias_C, activation)
        return pad(out_TC, (0, 0, 0, len(x_TC) - self._tokens))

    def recur(self, layer: int, given: RecurrenceInputs) -> Tensor:
        out_THV = self._inner.recur(layer, given.rows(lambda x: x[: self._tokens]))
        return pad(out_THV, (0, 0, 0, 0, 0, len(given.v) - self._tokens))


class ReversedRecurrence:
    """A `Recurrence` for a batch with reversed rows."""

    def __init__(self, inner: Recurrence) -> None:
        self._inner = inner

    def convolve(
        self, layer: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
    ) -> Tensor:
        return self._inner.convolve(layer, x_TC.flip(0), weight_CW, bias_C, activation).flip(0)

    def recur(self, layer: int, given: RecurrenceInputs) -> Tensor:
        return self._inner.recur(layer, given.rows(lambda x: x.flip(0))).flip(0)


class WithRecurrence:
    """An `Attention` that comes with the recurrence of the same batch."""

    def __init__(self, attention: Attention, recurrence: Recurrence) -> None:
        self.attend = attention.attend
        self.expanded = expanded_of(attention)
        self.recurrence = recurrence
        self.reads_pages = True


class _LoadedWithRecurrence(WithRecurrence):
    """Attention in fixed buffers that comes with the recurrence of the same steps."""

    def __init__(self, attention: StaticPagedAttention | MixedAttention, recurrence: StaticRecurrence) -> None:
        super().__init__(attention, recurrence)
        self._loads = attention.load, recurrence.load

    def load(self, runs: Sequence[TokenRun]) -> None:
        for load in self._loads:
            load(runs)


class StaticWithRecurrence(_LoadedWithRecurrence):
    """A `StaticPagedAttention` that comes with the recurrence of the same steps."""

    def __init__(self, attention: StaticPagedAttention, recurrence: StaticRecurrence) -> None:
        super().__init__(attention, recurrence)
        self.batch, self.max_tokens, self.positions = attention.batch, attention.max_tokens, attention.positions


class MixedWithRecurrence(_LoadedWithRecurrence):
    """A `MixedAttention` that comes with the recurrence of the same steps."""

    def __init__(self, attention: MixedAttention, recurrence: StaticRecurrence) -> None:
        super().__init__(attention, recurrence)
        self.capacity = attention.capacity


class RecordedStates:
    """A `Recurrence` that only records the sizes of each layer's state; its outputs are zero."""

    def __init__(self) -> None:
        self.shapes: dict[int, StateShape] = {}

    def convolve(
        self, layer: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
    ) -> Tensor:
        channels, taps = weight_CW.shape
        assert layer not in self.shapes, f"expected one convolution in layer {layer}"
        self.shapes[layer] = StateShape(channels, taps)
        return torch.zeros_like(x_TC)

    def recur(self, layer: int, given: RecurrenceInputs) -> Tensor:
        _, heads, values = given.v.shape
        self.shapes[layer] = replace(self.shapes[layer], heads=heads, keys=given.k.shape[2], values=values)
        return torch.zeros_like(given.v)
