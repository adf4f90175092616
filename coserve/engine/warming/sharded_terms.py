"""Compiled layers that a warm-up trains with for their LoRA kernels alone."""

from __future__ import annotations

from contextlib import suppress

from coserve.errors import UnsupportedBase
from coserve.kernels.lora.interface import LoraBackend
from coserve.model.base import Base
from coserve.model.layers import LayerCut
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.model.training.trace import interpreted
from coserve.parallel.lora import Strategy


def layers_with_other_terms(base: Base, backend: LoraBackend) -> list[CompiledLayers]:
    """Layers without a compiler, where compiled ones run other LoRA kernels than the base's own: of fully sharded adapters, whose gradients the
    base's own layers get from autograd. Empty elsewhere, and where the base has no compiled layers."""
    if base.sharding is None or base.sharding.strategy is not Strategy.SLORA or not backend.groups_inputs:
        return []
    with suppress(UnsupportedBase):
        layers = CompiledLayers(base, LayerCut(base), interpreted)
        layers.compile()
        return [layers]
    return []
