"""Distributions of requests over adapters, of prompt and answer lengths in tokens, and prompts of a given length."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from enum import StrEnum

from coserve.core.errors import InvalidRequest
from coserve.core.types import Wire

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


class Shape(StrEnum):
    DISTINCT = "distinct"
    """Round robin over the adapters."""
    UNIFORM = "uniform"
    """Every adapter equally likely."""
    SKEWED = "skewed"
    """The i-th adapter is `exponent` times as likely as the next one. Punica calls 1.5 "Zipf-1.5" (section 6.1)."""
    POWER_LAW = "power_law"
    """The i-th adapter's probability is proportional to `i ** -exponent` (S-LoRA, section 6.2); 0 is uniform."""
    IDENTICAL = "identical"
    """All requests are for one adapter."""


class Popularity(Wire, frozen=True):
    shape: Shape = Shape.UNIFORM
    exponent: float = 1.5

    def __post_init__(self) -> None:
        low = 1.0 if self.shape is Shape.SKEWED else 0.0
        if not (math.isfinite(self.exponent) and self.exponent >= low):
            raise InvalidRequest(f"expected at least {low:g}, got {self.exponent}", field="popularity.exponent")


def shares(popularity: Popularity, adapters: int) -> list[float]:
    """Return the long-run fraction of requests per adapter, in descending order; the sum is 1."""
    match popularity.shape:
        case Shape.DISTINCT | Shape.UNIFORM:
            weights = [1.0] * adapters
        case Shape.SKEWED:
            weights = [popularity.exponent ** (-i) for i in range(adapters)]
        case Shape.POWER_LAW:
            weights = [(i + 1) ** (-popularity.exponent) for i in range(adapters)]
        case Shape.IDENTICAL:
            weights = [1.0] + [0.0] * (adapters - 1)
    total = sum(weights)
    return [weight / total for weight in weights]


def choices(popularity: Popularity, adapters: int, rng: random.Random) -> Iterator[int]:
    """Yield endless indices of adapters, 0 the most popular. `adapters` is at least 1."""
    if popularity.shape is Shape.DISTINCT:
        return itertools.cycle(range(adapters))
    limits = list(itertools.accumulate(shares(popularity, adapters)))
    return (rng.choices(range(adapters), cum_weights=limits)[0] for _ in itertools.count())
