"""Compiled layers in a training pass: which batches they take, and what they keep. T packed tokens, D hidden."""

from __future__ import annotations

from torch import Tensor

from coserve.model.forward_context import ForwardContext
from coserve.model.layers import LayerInputs
from coserve.model.training.compiled_layers import CompiledLayers


def takes(compiled: CompiledLayers, context: ForwardContext, tokens: int, *, learns: bool) -> bool:
    """Whether compiled layers are right for this batch: its sites run in groups, so without LoRA dropout, and if it `learns`, the
    kernels add gradients to sums of the pairs' own."""
    if not compiled.fits(tokens):
        return False
    if context.lora is None:
        return not learns
    return context.grouped and (context.lora.anchor is not None or not learns)


class CompiledLayerPass:
    """Implements `LayerPass`."""

    def __init__(
        self, compiled: CompiledLayers, inputs: LayerInputs, context: ForwardContext, first: int, *, recompute: bool
    ) -> None:
        """`first`: the lowest layer that is trained. `recompute`: keep only the layers' inputs, and run them again."""
        self._pass, self._first, self._recompute = compiled.begin(inputs, context.lora), first, recompute
        self._saved: list[list[object]] = []
        self._inputs: list[Tensor] = []

    def forward(self, i: int, h_1TD: Tensor) -> Tensor:
        """As `LayerPass.forward`."""
        keeps = i >= self._first and not self._recompute
        output_1TD, saved = self._pass.forward(i, h_1TD, keeps=keeps)
        if keeps:
            self._saved.append(saved)
        elif i >= self._first:
            self._inputs.append(h_1TD)
        return output_1TD

    def backward(self, i: int, gradient_1TD: Tensor) -> Tensor:
        """As `LayerPass.backward`."""
        if self._recompute:
            _, saved = self._pass.forward(i, self._inputs.pop(), keeps=True)
        else:
            saved = self._saved.pop()
        return self._pass.backward(i, saved, gradient_1TD)
