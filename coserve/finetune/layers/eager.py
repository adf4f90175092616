"""The base's own layers in a training pass, differentiated by autograd.

Each layer's input is detached into a leaf, so that every layer has its own autograd graph, and the backward runs layer
by layer: `torch.autograd.grad` with respect to that leaf and the layer's LoRA tensors. A layer that reads an earlier
one's keys and values reads leaves (`carried`), and so are arguments that depend on the embedding (`finetune.ends`).

T packed tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.finetune.layers.carried import CarriedKv, collect
from coserve.finetune.layers.interface import LayerTensors
from coserve.model.forward_context import ForwardContext, running
from coserve.model.layers import LayerCut, LayerInputs


class EagerLayerPass:
    """Implements `LayerPass`."""

    def __init__(
        self,
        cut: LayerCut,
        inputs: LayerInputs,
        context: ForwardContext,
        trainable: LayerTensors,
        grads: LayerTensors,
        first: int,
        keep_from: int,
    ) -> None:
        """`trainable`, `grads`: see `MicroBatchRunner.forward_backward`. `first`: the lowest trained layer;
        `keep_from`: the lowest trained layer that is not recomputed."""
        self._cut, self._inputs, self._context = cut, inputs, context
        self._trainable, self._grads, self._first, self._keep_from = trainable, grads, first, keep_from
        experts = None if context.lora is None else context.lora.experts
        self._of_experts = frozenset[int]() if experts is None else experts.learned
        self._kv = CarriedKv(inputs.attention, cut.kv_sources, first)
        self._saved: list[tuple[Tensor, Sequence[Tensor]]] = []
        """Each layer's input and outputs (see `_layer`), kept for the backward; none if the layer is recomputed."""

    def forward(self, i: int, h_1TD: Tensor) -> Tensor:
        learns = i >= self._first
        keep_graph = learns and i >= self._keep_from
        input_1TD = h_1TD.detach().requires_grad_(keep_graph and i > self._first)
        outputs = self._layer(i, input_1TD, gradient=keep_graph)
        if learns:
            self._saved.append((input_1TD, outputs if keep_graph else ()))
        return outputs[0].detach()

    def backward(self, i: int, gradient_1TD: Tensor) -> Tensor:
        bottom, (input_1TD, outputs) = i == self._first, self._saved.pop()
        if not outputs:
            input_1TD = input_1TD.detach().requires_grad_(not bottom)
            outputs = self._layer(i, input_1TD, gradient=True)
        output_1TD, *made = outputs
        if not output_1TD.requires_grad:  # no site of the bottom layer ran: no token was routed to its expert
            return gradient_1TD
        anchor = None if self._context.lora is None else self._context.lora.anchor
        learned, grads = self._trainable[i], self._grads[i]
        if anchor is not None:  # the kernels add to the sums of linear modules themselves
            both = [own for own in zip(learned, grads, strict=True) if id(own[0]) in self._of_experts]
            learned, grads = [tensor for tensor, _ in both], [grad for _, grad in both]
        reached, leaves = anchor if bottom else input_1TD, [*self._kv.read_by(i), *self._inputs.learned(i)]
        wanted = [*learned, *leaves] if reached is None else [*learned, *leaves, reached]
        begin, gradients = zip((output_1TD, gradient_1TD), *self._kv.gradients(i, made), strict=True)
        found = torch.autograd.grad(begin, wanted, gradients, allow_unused=True)
        add_gradients(grads, found[: len(learned)])
        collect(leaves, found[len(learned) :])
        if bottom:
            return gradient_1TD
        assert found[-1] is not None, "a layer's output depends on its input"
        return found[-1]

    def _layer(self, i: int, h_1TD: Tensor, *, gradient: bool) -> Sequence[Tensor]:
        """Return the layer's output, then its keys and values if other layers read them."""
        with torch.set_grad_enabled(gradient), running(self._context):
            output_1TD = self._cut.layer(i, h_1TD, self._inputs, self._kv)
        return output_1TD, *self._kv.take(i)


def add_gradients(grads: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
    """Add gradients in the compute dtype to the fp32 sums. None: the tensor did not contribute to the output."""
    pairs = [(total, gradient) for total, gradient in zip(grads, found, strict=False) if gradient is not None]
    if pairs:
        torch._foreach_add_([total for total, _ in pairs], [gradient for _, gradient in pairs])
