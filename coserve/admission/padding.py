"""The sizes of batches whose layers run as CUDA graphs. Pure: no torch."""

from __future__ import annotations

LEAST_STEP = 64
"""Tokens; batches are filled up to a multiple of it, or of a sixteenth of their size."""
MOST_SHAPES = 6
"""Shapes of batches that have graphs at once. Each keeps its static tensors between its batches."""


def padded(tokens: int, least_step: int = LEAST_STEP) -> int:
    """The size that a batch of so many tokens is filled up to, so that batches of few sizes need graphs."""
    step = max(least_step, 1 << max(tokens.bit_length() - 5, 0))
    return -(-tokens // step) * step
