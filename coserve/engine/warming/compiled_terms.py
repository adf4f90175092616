"""The LoRA kernels of training's compiled layers, launched without the layers."""

from __future__ import annotations

import torch

from coserve.finetune.init import zero_adapter
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base
from coserve.model.lora import LoraBatch
from coserve.parallel.lora import Strategy
from coserve.types import LoraSettings, TrainingSettings

DIVISOR = 16
"""Of numbers that Triton specializes kernels on."""


def differ(base: Base, backend: LoraBackend) -> bool:
    """Whether compiled layers launch other specializations of the LoRA kernels than the base's own layers, whose inputs are shared (`share_inputs`): for fully
    sharded adapters, whose gradients the base's own layers get from autograd; and where 16 does not divide all outputs of sites that share an
    input: in compiled layers the outputs' gradients are columns of one tensor, elsewhere each is a tensor of its own, and Triton
    specializes a kernel on whether 16 divides the distance between rows."""
    if not backend.groups_inputs:
        return False
    sharded = base.sharding is not None and base.sharding.strategy is Strategy.SLORA
    return sharded or any(
        size % DIVISOR for shared in base.sites.shared() if len(shared.sizes) > 1 for size in shared.sizes
    )


class CompiledTerms:
    """Terms of one adapter that learns, at all sites. What they compute means nothing."""

    def __init__(self, base: Base, backend: LoraBackend, settings: LoraSettings) -> None:
        start = zero_adapter(settings, base.spec, dtype=torch.float32, device=base.device)
        partition = base.partition(start)
        optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(steps=1), base.dtype, partition=partition)
        self._base, self._backend, self._weights = base, backend, optimizer.weights()

    @torch.no_grad()
    def launch(self, tokens: int) -> None:
        """Forward, as it is where the backward runs it again, too, and backward of a micro-batch."""
        base = self._base
        batch = LoraBatch(Segments((0, tokens), (0,)), (self._weights,), self._backend)
        lora = base.prepare(batch).lora
        assert lora is not None, "expected an adapter's terms"
        for shared in base.sites.shared():
            x_TD = torch.zeros(tokens, shared.weight.shape[1], dtype=base.dtype, device=base.device)
            lora.linear_forward(shared.group, x_TD, shared.stacked, keep=False)
            y_TO, kept = lora.linear_forward(shared.group, x_TD, shared.stacked, keep=True)
            lora.linear_backward(shared.group, torch.zeros_like(y_TO), x_TD, kept, shared.stacked)
