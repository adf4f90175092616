"""Recurrent layers of compiled training layers: a convolution that is traced, and the opaque op
`coserve::recur_rows`, whose launches depend on the lengths of the packed rows.

Like `training.ops`, the ops look up the running pass when they run. T, C, W, H, G, K, V: see
`kernels.recurrent.interface`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coserve.kernels.recurrent.interface import RecurrenceInputs
from coserve.kernels.recurrent.reference import convolved, normalized
from coserve.model.forward_context import register_ops
from coserve.model.training.ops import running_pass


def _offsets(x: Tensor) -> Tensor:
    """Return each row's index in its own sequence, as int32: (T, C) -> (T)."""
    return running_pass().row_offsets(x.device).clone()  # an op must not return what others hold


def _recur(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    """Compute `Recurrence.recur` of the packed rows, whose inputs are `normalized`: (T, G, K) twice, (T, H, V) ->
    (T, H, V)."""
    return running_pass().recur(RecurrenceInputs(q, k, v, decay, beta)).contiguous()


def _recur_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> list[Tensor]:
    """Return the gradients of q, k, v, the decay and, if there is one, beta."""
    return [
        gradient.contiguous()
        for gradient in running_pass().recur_backward(RecurrenceInputs(q, k, v, decay, beta), dout)
    ]


def _recur_backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, decay, beta) if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401 - torch's own signature
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's own signature
    gradients = torch.ops.coserve.recur_rows_backward(dout, *ctx.saved_tensors)
    return *gradients, *[None] * (5 - len(gradients))


def _register() -> torch.library.Library:
    given = "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta"
    ops = register_ops(
        ("row_offsets", "(Tensor x) -> Tensor", _offsets, lambda x: x.new_empty(x.shape[0], dtype=torch.int32)),
        ("recur_rows", f"({given}) -> Tensor", _recur, lambda q, k, v, *_: v.new_empty(v.shape)),
        ("recur_rows_backward", f"(Tensor dout, {given}) -> Tensor[]", _recur_backward, _recur_backward_fake),
    )
    torch.library.register_autograd("coserve::recur_rows", _differentiate, setup_context=_keep, lib=ops)
    return ops


_OPS = _register()
RECUR = torch.ops.coserve.recur_rows.default


class RecurRows:
    """The `Recurrence` of a traced training layer: delegates to the running pass."""

    def convolve(
        self, layer: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
    ) -> Tensor:
        """Compute `Recurrence.convolve` by operations that the compiler fuses."""
        offsets_T = torch.ops.coserve.row_offsets(x_TC.detach())
        return convolved(x_TC, offsets_T, weight_CW, bias_C, activation)

    def recur(self, layer: int, given: RecurrenceInputs) -> Tensor:
        """Call the running pass's `recur`, with queries and keys that are normalised in traced operations; ignores
        `layer`."""
        out: Tensor = torch.ops.coserve.recur_rows(*normalized(given)[:5])
        return out
