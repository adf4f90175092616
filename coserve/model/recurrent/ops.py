"""The recurrent layers of compiled forwards: opaque ops that look up the running forward's recurrence.

Like `coserve::attend` (`model.fused`): one compiled layer serves every layer and batch. T, C, H, G, K, V: see
`kernels.recurrent.interface`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coserve.kernels.recurrent.interface import Recurrence, RecurrenceInputs, RecurrenceParams
from coserve.kernels.recurrent.wrappers import recurrence_of
from coserve.model.forward_context import current, register_ops, running_fused


def _running() -> Recurrence:
    return recurrence_of(running_fused().attention)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Run `Recurrence.convolve` of the running batch and layer: (T, C) -> (T, C)."""
    return _running().convolve(current.layer, x, weight, bias, activation).contiguous()


def _recur(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, scale: float, normalize: bool
) -> Tensor:
    """Run `Recurrence.recur` of the running batch and layer: (T, G, K) twice, (T, H, V) -> (T, H, V)."""
    given = RecurrenceInputs(q, k, v, decay, beta, RecurrenceParams(scale, normalize))
    return _running().recur(current.layer, given).contiguous()


_OPS = register_ops(
    (
        "convolve",
        "(Tensor x, Tensor weight, Tensor? bias, str? activation) -> Tensor",
        _convolve,
        lambda x, *_: x.new_empty(x.shape),
    ),
    (
        "recur",
        "(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, float scale, bool normalize) -> Tensor",
        _recur,
        lambda q, k, v, *_: v.new_empty(v.shape),
    ),
)


class RunningRecurrence:
    """The `Recurrence` of a compiled layer: delegates to the running batch's, in the layer that runs."""

    def convolve(
        self, layer: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
    ) -> Tensor:
        """Call the running `Recurrence.convolve`; ignores `layer`."""
        out: Tensor = torch.ops.coserve.convolve(x_TC, weight_CW, bias_C, activation)
        return out

    def recur(self, layer: int, given: RecurrenceInputs) -> Tensor:
        """Call the running `Recurrence.recur`; ignores `layer`."""
        out: Tensor = torch.ops.coserve.recur(*given[:5], *given.params)
        return out


RUNNING_RECURRENCE = RunningRecurrence()
