"""Opaque ops of compiled training layers: `coserve::learn`, for all the sites that read one input,
`coserve::attend_rows`, and, if ranks share the base, `coserve::sum_ranks`.

They look up the running pass (`RunningPass`) when they run, not when they are traced: one compiled layer serves every
layer of its kind and every batch. Weights of the base and adapters are no inputs of compiled code, and gradients of
adapters no outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coserve.kernels.attention.interface import AttentionFields, AttentionParams
from coserve.model.forward_context import ATTENTION_FIELDS, current, register_ops
from coserve.model.parallel.mesh import LoneRank
from coserve.model.training.running_pass import RunningPass


def running_pass() -> RunningPass:
    found = current.context.training
    assert isinstance(found, RunningPass), "expected to run within CompiledLayers"
    return found


def _learn(x: Tensor, width: int, group: int) -> Tensor:
    """Return the outputs of the sites of one input, concatenated, LoRA terms included: (..., D) -> (..., ΣO).

    `width`: ΣO.
    """
    y_TO = running_pass().learn(current.layer, group, x.reshape(-1, x.shape[-1]))
    return y_TO.view(*x.shape[:-1], width)


def _learn_backward(dy: Tensor, x: Tensor, group: int) -> Tensor:
    """Return the gradient of x, shaped as x. Adds those of the adapters to their sums."""
    dx_TD = running_pass().learn_backward(
        current.layer, group, dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    )
    return dx_TD.view(x.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, *params: *AttentionFields) -> Tensor:
    """Compute `Attention.attend`: (H, T, D), (K, T, D), (K, T, E) -> (T, H, E)."""
    return running_pass().attend(current.layer, q, k, v, AttentionParams(*params)).contiguous()


def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *params: *AttentionFields
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    dq, dk, dv = running_pass().attend_backward(current.layer, (q, k, v), out, dout, AttentionParams(*params))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _sum_ranks(x: Tensor, place: int) -> Tensor:
    """Return the sum of all ranks' x."""
    return running_pass().sum_ranks(place, x)


def _attend_backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_learned(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401 - torch's own signature
    x, _, ctx.group = inputs
    ctx.save_for_backward(x)


def _learned(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 - torch's own signature
    (x,) = ctx.saved_tensors
    return torch.ops.coserve.learn_backward(dy, x, ctx.group), None, None


def _keep_attended(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401 - torch's own signature
    q, k, v, *ctx.params, sinks, ctx.chunked = inputs
    ctx.save_for_backward(q, k, v, output, sinks)


def _attended(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's own signature
    q, k, v, out, sinks = ctx.saved_tensors
    gradients = torch.ops.coserve.attend_rows_backward(dout, q, k, v, out, *ctx.params, sinks, ctx.chunked)
    return *gradients, None, None, None, None, None


def _register() -> torch.library.Library:
    qkv = "Tensor q, Tensor k, Tensor v"
    ops = register_ops(
        (
            "learn",
            "(Tensor x, int width, int group) -> Tensor",
            _learn,
            lambda x, width, group: x.new_empty((*x.shape[:-1], width)),
        ),
        (
            "learn_backward",
            "(Tensor dy, Tensor x, int group) -> Tensor",
            _learn_backward,
            lambda dy, x, group: x.new_empty(x.shape),
        ),
        (
            "attend_rows",
            f"({qkv}, {ATTENTION_FIELDS}) -> Tensor",
            _attend,
            lambda q, k, v, *_: q.new_empty((q.shape[1], q.shape[0], v.shape[2])),
        ),
        (
            "attend_rows_backward",
            f"(Tensor dout, {qkv}, Tensor out, {ATTENTION_FIELDS}) -> (Tensor, Tensor, Tensor)",
            _attend_backward,
            _attend_backward_fake,
        ),
        ("sum_ranks", "(Tensor x, int place) -> Tensor", _sum_ranks, lambda x, place: x.new_empty(x.shape)),
    )
    torch.library.register_autograd("coserve::learn", _learned, setup_context=_keep_learned, lib=ops)
    torch.library.register_autograd("coserve::attend_rows", _attended, setup_context=_keep_attended, lib=ops)
    return ops


_OPS = _register()
LEARN, ATTEND = torch.ops.coserve.learn.default, torch.ops.coserve.attend_rows.default


class AttendRows:
    """The `Attention` of a traced training layer: delegates to the running pass, in the layer that runs."""

    any_layer = True

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> Tensor:
        """Call the running pass's `attend`; ignores `layer`."""
        out: Tensor = torch.ops.coserve.attend_rows(q_HTD, k_KTD, v_KTD, *params)
        return out


class TracedRanks(LoneRank):
    """The mesh of a traced training layer: delegates to the running pass, in the layer that runs."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._sums = 0

    def all_reduce(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """Compute `Mesh.all_reduce` as an op of its own for each traced call."""
        self._sums += 1
        found: Tensor = torch.ops.coserve.sum_ranks(x, self._sums - 1)
        return found if addend is None else found + addend

    def all_gather_parts(self, x: Tensor) -> Tensor:
        """Never called in layers, as LoRA terms are not traced."""
        raise NotImplementedError("a traced layer gathers nothing")
