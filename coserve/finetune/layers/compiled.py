"""Compiled layers in a training pass: which batches they take, and what they keep. T packed tokens, D hidden."""

from __future__ import annotations

from torch import Tensor

from coserve.model.forward_context import ForwardContext
from coserve.model.training.compiled_layers import CompiledPass
from coserve.types import JobSpec


def takes(context: ForwardContext, *, learns: bool) -> bool:
    """Whether compiled layers can compute this batch's adapters: its sites run in groups, so without LoRA dropout, and if it
    `learns`, the kernels add gradients to sums of the pairs' own."""
    if context.lora is None:
        return not learns
    return context.grouped and (context.lora.sums_gradients or not learns)


def uncompiled(spec: JobSpec) -> list[str]:
    """What of a job does not run compiled layers, for an operator."""
    found = []
    if spec.lora.dropout > 0:
        found.append("its layers run operation by operation: compiled ones do without LoRA dropout")
    if spec.teacher is not None:
        found.append("its teacher's forward runs operation by operation: compiled layers are for adapters that learn")
    return found


class CompiledLayerPass:
    """Implements `LayerPass`."""

    def __init__(self, compiled: CompiledPass, first: int, keep_from: int) -> None:
        """`first`: the lowest layer that is trained; `keep_from`: the lowest one of those that is not recomputed."""
        self._pass, self._first, self._keep_from = compiled, first, keep_from
        self._saved: list[list[object]] = []
        self._inputs: list[Tensor] = []

    def forward(self, i: int, h_1TD: Tensor) -> Tensor:
        """As `LayerPass.forward`."""
        keeps = i >= self._first and i >= self._keep_from
        output_1TD, saved = self._pass.forward(i, h_1TD, keeps=keeps)
        if keeps:
            self._saved.append(saved)
        elif i >= self._first:
            self._inputs.append(h_1TD)
        return output_1TD

    def backward(self, i: int, gradient_1TD: Tensor) -> Tensor:
        """As `LayerPass.backward`."""
        if i < self._keep_from:
            _, saved = self._pass.forward(i, self._inputs.pop(), keeps=True)
        else:
            saved = self._saved.pop()
        return self._pass.backward(i, saved, gradient_1TD)
