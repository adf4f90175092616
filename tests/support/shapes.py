"""Shapes of generation steps."""

from __future__ import annotations

from coserve.queues.shapes import StepShape, prompt_pairs


def and_prompt(shape: StepShape, tokens: int, computed: int = 0) -> StepShape:
    """The shape with `tokens` tokens more of a prompt whose first `computed` tokens are in the cache."""
    return shape._replace(prefill=shape.prefill + tokens, pairs=shape.pairs + prompt_pairs(tokens, computed))
