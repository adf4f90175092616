"""The LoRA kernels of training's compiled layers, launched without the layers."""

from __future__ import annotations

import torch

from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.finetune.init import zero_adapter
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base
from coserve.model.lora import LoraBatch
from coserve.model.parallel.lora import Strategy

DIVISOR = 16
"""Triton specializes kernels on whether numbers are divisible by this."""


def differ(base: Base, backend: LoraBackend) -> bool:
    """Whether training compiles other LoRA kernels in compiled layers than in the base's own.

    True for fully sharded adapters: the base's own layers get their gradients from autograd. Also true where sites
    share an input (such as q, k and v) and 16 does not divide the size of an output. Triton recompiles a kernel
    depending on whether 16 divides the row stride, and the gradients of these outputs are columns of one tensor in
    compiled layers, but separate tensors elsewhere. The base's sites must share inputs already (`share_inputs`).
    """
    if not backend.groups_inputs:
        return False
    sharded = base.sharding is not None and base.sharding.strategy is Strategy.SLORA
    return sharded or any(
        size % DIVISOR for shared in base.sites.shared() if len(shared.sizes) > 1 for size in shared.sizes
    )


class CompiledTerms:
    """The LoRA terms of one adapter in training, at all sites. Inputs and gradients are zeros."""

    def __init__(self, base: Base, backend: LoraBackend, settings: LoraSettings) -> None:
        start = zero_adapter(settings, base.spec, dtype=torch.float32, device=base.device)
        partition = base.partition(start)
        optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(steps=1), base.dtype, partition=partition)
        self._base, self._backend, self._weights = base, backend, optimizer.weights()

    @torch.no_grad()
    def launch(self, tokens: int) -> None:
        """Run forward and backward of a micro-batch of `tokens` tokens, and a forward that keeps nothing for the
        backward."""
        base = self._base
        batch = LoraBatch(Segments((0, tokens), (0,)), (self._weights,), self._backend)
        lora = base.prepare(batch).lora
        assert lora is not None, "expected an adapter's terms"
        for shared in base.sites.shared():
            x_TD = torch.zeros(tokens, shared.stacked.in_features, dtype=base.dtype, device=base.device)
            lora.linear_forward(shared.group, x_TD, shared.stacked, keep=False)
            y_TO, kept = lora.linear_forward(shared.group, x_TD, shared.stacked, keep=True)
            lora.linear_backward(shared.group, torch.zeros_like(y_TO), x_TD, kept, shared.stacked)
