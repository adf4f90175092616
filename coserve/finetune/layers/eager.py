"""The base's own layers in a training pass, differentiated by autograd.

Each layer's input is detached into a leaf, so that every layer has its own autograd graph, and the backward runs layer
by layer: `torch.autograd.grad` with respect to that leaf and the layer's LoRA tensors. A layer that reads an earlier
one's keys and values reads leaves (`CarriedKv`), and so are arguments that depend on the embedding (`finetune.ends`).

T packed tokens, D hidden; in `CarriedKv` H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from coserve.finetune.layers.interface import LayerTensors
from coserve.kernels.attention.interface import Attention, AttentionParams
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


class CarriedKv:
    """The batch's attention, in which a layer that reads an earlier layer's keys and values reads leaves instead.

    So every layer has its own autograd graph. The leaves collect the gradients of all layers that read them, and the
    backward of the layer that made them, which comes last, begins with these, too.
    """

    def __init__(self, inner: Attention, sources: Mapping[int, int], first: int) -> None:
        """`sources`: the source of each layer that reads another's keys and values. `first`: the lowest trained layer;
        keys and values of those below need no gradients."""
        self._inner, self._sources, self._first = inner, sources, first
        self._read = frozenset(sources.values())
        self._made: tuple[Tensor, ...] = ()
        self._leaves: dict[int, tuple[Tensor, ...]] = {}

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> Tensor:
        """See `Attention.attend`."""
        if layer in self._sources:
            k_KTD, v_KTD = self._leaves[self._sources[layer]]
        elif layer in self._read:
            self._made = k_KTD, v_KTD
        return self._inner.attend(layer, q_HTD, k_KTD, v_KTD, params)

    def take(self, layer: int) -> tuple[Tensor, ...]:
        """Return the keys and values that the layer has just made, as it gave them to `attend`; nothing if no other
        layer reads them. The first time, make the leaves; when the backward runs the layer again, they stay."""
        made, self._made = self._made, ()
        if made and layer not in self._leaves:
            self._leaves[layer] = tuple(one.detach().requires_grad_(layer >= self._first) for one in made)
        return made

    def read_by(self, layer: int) -> tuple[Tensor, ...]:
        """Return the leaves that the layer reads and that need gradients: keys and values, or nothing."""
        leaves = self._leaves.get(self._sources.get(layer, -1), ())
        return tuple(leaf for leaf in leaves if leaf.requires_grad)

    def gradients(self, layer: int, made: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return those of a layer's keys and values that depend on what is trained, each with the gradient that the
        layers above have collected, and forget these."""
        leaves = self._leaves.pop(layer, ())
        both = [(one, leaf.grad) for one, leaf in zip(made, leaves, strict=True) if one.requires_grad]
        return [(one, gradient) for one, gradient in both if gradient is not None]


def collect(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to those that the leaves have collected. None: a leaf did not contribute."""
    for leaf, gradient in zip(leaves, gradients, strict=False):
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
