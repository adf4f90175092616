"""Chooses the LoRA backend. No other module makes this choice."""

from __future__ import annotations

import torch

from coserve.core.errors import ConfigError
from coserve.kernels.lora.grouped import GroupedBackend, PerAdapterBackend
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.reference import ReferenceBackend

BACKENDS = ("reference", "naive", "grouped", "block_sparse", "segmented")
"""Values of the setting `lora_backend`, besides `auto`."""


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype) -> LoraBackend:
    """Return the backend of a setting's value. `auto`: `segmented` on CUDA, `grouped` elsewhere.

    Raises:
        ConfigError: an unknown name; a Triton backend without a GPU, or in bfloat16 under Triton's interpreter, whose
            results in that dtype are silently wrong.
    """
    if requested == "auto":
        requested = "segmented" if device.type == "cuda" else "grouped"
    backend = make_backend(requested)
    backend.refuse_unusable(device, dtype)
    return backend


def make_backend(name: str) -> LoraBackend:
    """Return the backend of one of `BACKENDS`. Raises `ConfigError` for another name."""
    match name:
        case "reference":
            return ReferenceBackend()
        case "naive":
            return PerAdapterBackend()
        case "grouped":
            return GroupedBackend()
        case "block_sparse":
            from coserve.kernels.lora.block_sparse import BlockSparseBackend  # imports stk only when used

            return BlockSparseBackend()
        case "segmented":
            from coserve.kernels.lora.segmented.backend import SegmentedBackend  # imports Triton only when used

            return SegmentedBackend()
    raise ConfigError(
        f"expected lora_backend to be one of auto, {', '.join(BACKENDS)}, got {name!r}", field="lora_backend"
    )
