"""Every LoRA backend, by name, and batches in which all tokens have one adapter."""

from __future__ import annotations

from coserve.kernels.lora.backend import BACKENDS, make_backend
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.model.dropout import DropoutSpec
from coserve.model.lora import LoraBatch, LoraWeights

REFERENCE, NAIVE, GROUPED, BLOCK_SPARSE, SEGMENTED = (make_backend(name) for name in BACKENDS)


def lora_of(
    weights: LoraWeights, tokens: int, backend: LoraBackend = GROUPED, dropout: DropoutSpec | None = None
) -> LoraBatch:
    return LoraBatch(Segments((0, tokens), (0,)), (weights,), backend, dropout)
