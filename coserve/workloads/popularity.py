"""Distributions of requests over adapters."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from enum import StrEnum

from coserve.core.errors import InvalidRequest
from coserve.core.types import Wire


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
