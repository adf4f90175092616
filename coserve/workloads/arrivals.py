"""Open-loop arrival processes, as pure generators of arrival times."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from enum import StrEnum

from coserve.errors import InvalidRequest
from coserve.types import Wire


class Process(StrEnum):
    CONSTANT = "constant"
    """One every `1 / rate` seconds, the first at 0 (the ETS paper, section 5.2.1)."""
    POISSON = "poisson"
    """Exponential gaps."""
    GAMMA = "gamma"
    """Gamma gaps with the coefficient of variation `cv` (S-LoRA, section 6.2); `cv` 1 is Poisson, above it bursts come.

    The burstiness of `vllm bench serve` is `1 / cv**2`.
    """


class Arrivals(Wire, frozen=True):
    """An arrival process of `rate` requests a second."""

    process: Process = Process.CONSTANT
    rate: float = 10.0
    cv: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("cv", self.cv)):
            if not (math.isfinite(value) and value > 0):
                raise InvalidRequest(f"expected a number above 0, got {value}", field=f"arrivals.{name}")


def arrival_times(arrivals: Arrivals, duration: float, rng: random.Random) -> Iterator[float]:
    """Ascending times in seconds, from 0 up to but without `duration`."""
    for time in _endless(arrivals, rng):
        if time >= duration:
            return
        yield time


def _endless(arrivals: Arrivals, rng: random.Random) -> Iterator[float]:
    match arrivals.process:
        case Process.CONSTANT:
            # Products, not sums: the ten thousandth arrival is as exact as the first.
            yield from (i / arrivals.rate for i in itertools.count())
        case Process.POISSON:
            yield from itertools.accumulate(rng.expovariate(arrivals.rate) for _ in itertools.count())
        case Process.GAMMA:
            shape = 1 / arrivals.cv**2
            scale = 1 / (arrivals.rate * shape)
            yield from itertools.accumulate(rng.gammavariate(shape, scale) for _ in itertools.count())
