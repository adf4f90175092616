"""Padded sizes of batches whose layers run as CUDA graphs. Pure: no torch."""

from __future__ import annotations

LEAST_STEP = 64
"""Tokens. Batches are padded to a multiple of it or, if that is larger, of the largest power of two up to a sixteenth
of their size."""
MOST_SHAPES = 6
"""Most batch sizes that have CUDA graphs at the same time. Each keeps its static tensors between batches."""


def padded(tokens: int, least_step: int = LEAST_STEP) -> int:
    """Return the size that a batch of `tokens` tokens is padded to, so that few sizes need CUDA graphs."""
    step = max(least_step, 1 << max(tokens.bit_length() - 5, 0))
    return -(-tokens // step) * step
