"""Layers that a warm-up trains with for the LoRA kernels of compiled ones alone."""

from __future__ import annotations

from contextlib import suppress

from coserve.errors import UnsupportedBase
from coserve.kernels.lora.interface import LoraBackend
from coserve.model.base import Base
from coserve.model.layers import LayerCut
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.model.training.trace import interpreted
from coserve.parallel.lora import Strategy

DIVISOR = 16
"""Of numbers that Triton specializes kernels on."""


def layers_with_other_terms(base: Base, backend: LoraBackend) -> list[CompiledLayers]:
    """Layers without a compiler, where compiled ones run other LoRA kernels than the base's own: of fully sharded adapters, whose gradients the
    base's own layers get from autograd; and of sites that share an input where 16 does not divide all their outputs. Empty elsewhere, and where the
    base has no compiled layers. The base's inputs are shared (`share_inputs`)."""
    if not backend.groups_inputs or not (_fully_sharded(base) or _specialized_apart(base)):
        return []
    with suppress(UnsupportedBase):
        layers = CompiledLayers(base, LayerCut(base), interpreted)
        layers.compile()
        return [layers]
    return []


def _fully_sharded(base: Base) -> bool:
    return base.sharding is not None and base.sharding.strategy is Strategy.SLORA


def _specialized_apart(base: Base) -> bool:
    """Triton specializes a kernel on whether 16 divides the distance between rows. In compiled layers the outputs' gradients of sites that share an input
    are columns of one tensor, elsewhere each is a tensor of its own."""
    return any(size % DIVISOR for shared in base.sites.shared() if len(shared.sizes) > 1 for size in shared.sizes)
