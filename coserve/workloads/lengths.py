"""Lengths of prompts and answers in tokens, and prompts of a given length."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from enum import StrEnum

FIRST_ID = 256
"""Made prompts hold no ids below this one: many vocabularies begin with special tokens and single bytes."""
BLOCK = 512
"""Tokens of a block of a Mooncake trace: prompts that share a block's hash share its tokens."""


class Lengths(StrEnum):
    TEXTS = "texts"
    """Prompts are texts, as long as they are."""
    UNIFORM = "uniform"
    """Every length from the least to the most is equally likely (S-LoRA, table 3)."""
    LOGNORMAL = "lognormal"
    """The logarithm is normal, with the median and the standard deviation `length_sigma`, clipped to the least and the
    most."""


def draw_length(shape: Lengths, low: int, high: int, median: float, sigma: float, rng: random.Random) -> int:
    """A length from `low` to `high`. `low` above `high` counts as `high`."""
    low = min(low, high)
    if shape is Lengths.LOGNORMAL:
        return min(high, max(low, round(rng.lognormvariate(math.log(median), sigma))))
    return rng.randint(low, high)


def random_tokens(count: int, vocab: int, rng: random.Random) -> tuple[int, ...]:
    """Uniform token ids from `FIRST_ID` up to but without `vocab`."""
    return tuple(rng.choices(range(FIRST_ID, vocab), k=count))


def block_tokens(blocks: Iterable[int], count: int, vocab: int, seed: int, rng: random.Random) -> tuple[int, ...]:
    """`count` ids: those of the blocks, which depend on the block's hash and the seed alone, then random ones."""
    found: list[int] = []
    for block in blocks:
        if len(found) >= count:
            break
        found += random_tokens(BLOCK, vocab, random.Random(f"{seed}/block/{block}"))
    return (*found[:count], *random_tokens(max(0, count - len(found)), vocab, rng))
