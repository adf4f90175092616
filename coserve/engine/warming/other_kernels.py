"""Warm-up kernels that neither steps nor micro-batches of ordinary jobs launch."""

from __future__ import annotations

import torch

from coserve.finetune.losses.formulas import divergence_
from coserve.kernels.lora.segmented.adapter_table import Slots
from coserve.kernels.lora.segmented.launch_scale import scale_rows
from coserve.kernels.lora.segmented.plan import DECODE_ROWS, PREFILL_TILE_ROWS
from coserve.kernels.lora.segmented.tiles import StepTiles
from coserve.model.base import Base
from coserve.model.parallel.symmetric import launch_sums


def launch_other_kernels(base: Base) -> None:
    """Launch these kernels; call it inside `compile_only`, which compiles kernels instead of launching them."""
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
