"""Kernels that a warm-up launches by themselves: those of LoRA in training's compiled layers, without the layers, and
those that neither steps nor micro-batches of ordinary jobs launch."""

from __future__ import annotations

import torch

from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.finetune.init import zero_adapter
from coserve.finetune.losses.formulas import divergence_
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segmented.adapter_table import Slots
from coserve.kernels.lora.segmented.launch_scale import scale_rows
from coserve.kernels.lora.segmented.plan import DECODE_ROWS, PREFILL_TILE_ROWS
from coserve.kernels.lora.segmented.tiles import StepTiles
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base
from coserve.model.lora import LoraBatch
from coserve.model.parallel.lora import Strategy
from coserve.model.parallel.symmetric import launch_sums

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


def launch_other_kernels(base: Base) -> None:
    """Launch the kernels that neither steps nor micro-batches of ordinary jobs launch. Call it inside `compile_only`,
    which compiles kernels instead of launching them."""
    _divergence(base)
    _scales(base)
    if base.sharding is not None and base.device.type == "cuda":
        for rank in range(base.sharding.mesh.size):  # each rank has its own kernels
            launch_sums(rank, base.sharding.mesh.size, base.device)


def _scales(base: Base) -> None:
    """Scale rows as steps with DoRA adapters do."""
    y, table = torch.zeros(1, 1, dtype=base.dtype, device=base.device), Slots(1, 1, base.device).table(0, 1)
    for rows in (*DECODE_ROWS, PREFILL_TILE_ROWS):
        tiles = StepTiles(rows, 1, 0, 1, base.device).tiles
        for biased in {bias is not None for bias in base.sites.biases.values()}:
            scale_rows([y], tiles, table, [y[0] if biased else None])


def _divergence(base: Base) -> None:
    """Run the loss of a job with a teacher."""
    local = base.sharding
    width = base.spec.vocab if local is None else local.vocabulary.local * local.mesh.size
    logits = torch.zeros(1, width, dtype=base.dtype, device=base.device)[:, : base.spec.vocab]
    found = torch.empty(1, 2, dtype=torch.float64, device=base.device)
    divergence_(logits, logits, logits.new_zeros(1, dtype=torch.int64), found, None)
