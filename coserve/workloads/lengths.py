"""Distributions of prompt and answer lengths in tokens, and prompts of a given length."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from enum import StrEnum

FIRST_ID = 256
"""Generated prompts hold no ids below this one: many vocabularies begin with special tokens and single bytes."""
BLOCK = 512
"""Tokens per block of a Mooncake trace: prompts that share a block's hash share its tokens."""


class Lengths(StrEnum):
    TEXTS = "texts"
    """Prompts are whole texts."""
    UNIFORM = "uniform"
    """Uniform from the minimum to the maximum length (S-LoRA, table 3)."""
    LOGNORMAL = "lognormal"
    """Log-normal with the given median and standard deviation `length_sigma` (of the logarithm), clipped to the minimum
    and maximum."""


def draw_length(shape: Lengths, low: int, high: int, median: float, sigma: float, rng: random.Random) -> int:
    """Draw a length from `low` to `high`. If `low` exceeds `high`, return `high`."""
    low = min(low, high)
    if shape is Lengths.LOGNORMAL:
        return min(high, max(low, round(rng.lognormvariate(math.log(median), sigma))))
    return rng.randint(low, high)


def random_tokens(count: int, vocab: int, rng: random.Random) -> tuple[int, ...]:
    """Draw uniform token ids from `FIRST_ID` up to but without `vocab`."""
    return tuple(rng.choices(range(FIRST_ID, vocab), k=count))


def block_tokens(blocks: Iterable[int], count: int, vocab: int, seed: int, rng: random.Random) -> tuple[int, ...]:
    """Return `count` ids: first those of the blocks, a function of block hash and `seed`, then random ones."""
    found: list[int] = []
    for block in blocks:
        if len(found) >= count:
            break
        found += random_tokens(BLOCK, vocab, random.Random(f"{seed}/block/{block}"))
    return (*found[:count], *random_tokens(max(0, count - len(found)), vocab, rng))
