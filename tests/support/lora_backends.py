"""Every LoRA backend, by name."""

from __future__ import annotations

from coserve.kernels.lora.backend import BACKENDS, make_backend

REFERENCE, NAIVE, GROUPED, BLOCK_SPARSE, SEGMENTED = (make_backend(name) for name in BACKENDS)
