"""Compiled layers in a training pass: which batches they can run, and what they keep. T packed tokens, D hidden."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from coserve.core.gpu_memory import Kept
from coserve.core.training.jobs import JobSpec
from coserve.model.forward_context import ForwardContext
from coserve.model.training.compiled_layers import CompiledPass


def takes(context: ForwardContext, *, learns: bool) -> bool:
    """Whether compiled layers can run this batch. Sites that share an input must run as one group, which excludes LoRA
    dropout, and adapters of experts are excluded. `learns`: the kernels must also accumulate the LoRA gradients."""
    if context.lora is None:
        return not learns
    return context.grouped and context.lora.experts is None and (context.lora.sums_gradients or not learns)


def uncompiled(spec: JobSpec) -> list[str]:
    """Notes for the operator on the parts of a job that do not run compiled layers."""
    lora = spec.lora
    parts = {
        "LoRA dropout": lora.dropout > 0,
        "adapters of experts": lora.target_parameters,
        "a cartridge or an encoder": spec.prefix,
        "adapters of the embedding": lora.trainable_token_indices
        or any("embed" in name or name.endswith("wte") for name in lora.targets or ()),
    }
    without = "its layers run operation by operation: compiled ones do without"
    found = [f"{without} {part}" for part, present in parts.items() if present]
    if spec.teacher is not None:
        found.append("its teacher's forward runs operation by operation: compiled layers are for adapters that learn")
    return found


class CompiledLayerPass:
    """Implements `LayerPass`."""

    def __init__(self, compiled: CompiledPass, first: int, levels: Sequence[Kept]) -> None:
        """`first`: the lowest trained layer; `levels`: what each layer keeps for the backward. Layers below `first`
        keep nothing, but their outputs are rounded as if they did. If a level is not compiled, the layer keeps its
        input, and its backward runs the whole forward again."""
        self._pass, self._first = compiled, first
        self._levels = [level if compiled.has(level) else None for level in levels]
        self._saved: list[list[object]] = []
        self._inputs: list[Tensor] = []

    def forward(self, i: int, h_1TD: Tensor) -> Tensor:
        level, trained = self._levels[i], i >= self._first
        output_1TD, saved = self._pass.forward(i, h_1TD, level or Kept.ALL, learns=trained and level is not None)
        if trained and level is not None:
            self._saved.append(saved)
        elif trained:
            self._inputs.append(h_1TD)
        return output_1TD

    def backward(self, i: int, gradient_1TD: Tensor) -> Tensor:
        level = self._levels[i]
        if level is None:
            level = Kept.ALL
            _, saved = self._pass.forward(i, self._inputs.pop(), level)
        else:
            saved = self._saved.pop()
        return self._pass.backward(i, saved, gradient_1TD, level, unread=i == self._first)


def levels_of(layers: int, first: int, recomputed: int, partly: int) -> tuple[Kept, ...]:
    """Return what each of `layers` layers keeps. From layer `first` up, the lowest `recomputed` keep their input only,
    the next `partly` also attention's output, all others everything."""
    found = [Kept.ALL] * layers
    lean = first + recomputed
    found[first:lean] = [Kept.INPUT] * (min(lean, layers) - first)
    found[lean : lean + partly] = [Kept.ATTENTION] * max(0, min(partly, layers - lean))
    return tuple(found)
