"""Open-loop arrival processes, as pure generators of arrival times.

A renewal process of rate 1 gives the gaps (`Process`); the rate over time (`Pattern`) stretches them. The n-th arrival
comes when the rate's integral reaches the n-th time of the process, so a bursty Gamma process can also ramp or switch
on and off.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from enum import StrEnum

from coserve.core.types import Wire
from coserve.workloads.bounds import ARRIVALS, check_bounds


class Process(StrEnum):
    CONSTANT = "constant"
    """One arrival every `1 / rate` seconds, the first at 0 (the ETS paper, section 5.2.1)."""
    POISSON = "poisson"
    """Exponential gaps between arrivals."""
    GAMMA = "gamma"
    """Gamma-distributed gaps with the coefficient of variation `cv` (S-LoRA, section 6.2). `cv` 1 is Poisson; above 1
    it is bursty.

    The burstiness of `vllm bench serve` is `1 / cv**2`. The process is stationary, so that `rate * duration` arrivals
    are expected for any `cv`: the first gap is the remainder of one that began earlier.
    """


class Pattern(StrEnum):
    """The arrival rate over time."""

    STEADY = "steady"
    """Constant `rate`."""
    ON_OFF = "on_off"
    """Repeats `rate` for `on_seconds`, then `off_rate` for `off_seconds`."""
    RAMP = "ramp"
    """Changes linearly from `rate` to `ramp_rate` over the whole duration."""


class Arrivals(Wire, frozen=True):
    """An arrival process. Rates in requests per second, times in seconds."""

    process: Process = Process.CONSTANT
    rate: float = 10.0
    cv: float = 1.0
    pattern: Pattern = Pattern.STEADY
    on_seconds: float = 10.0
    off_seconds: float = 10.0
    off_rate: float = 0.0
    ramp_rate: float = 0.0

    def __post_init__(self) -> None:
        check_bounds({name: getattr(self, name) for name in ARRIVALS}, ARRIVALS, "arrivals.")

    def most_expected(self, duration: float) -> float:
        """Return an upper bound of the expected number of arrivals in `duration` seconds."""
        rates = {Pattern.STEADY: 0.0, Pattern.ON_OFF: self.off_rate, Pattern.RAMP: self.ramp_rate}
        return max(self.rate, rates[self.pattern]) * duration


def arrival_times(
    arrivals: Arrivals, duration: float, rng: random.Random, *, share: float | None = None
) -> Iterator[float]:
    """Yield ascending times in seconds, from 0 up to but without `duration`.

    `share`: fraction of the rate, for a process that is one of several (one adapter's); a constant process then begins
    at a random phase.
    """
    if share == 0.0:
        return
    when = _inverse(arrivals, duration)
    for unit in _unit_times(arrivals, rng, shifted=share is not None):
        time = when(unit / (share or 1.0))
        if not time < duration:  # also true for NaN: with a tiny fraction of the rate the time overflows
            return
        yield time


def _unit_times(arrivals: Arrivals, rng: random.Random, *, shifted: bool) -> Iterator[float]:
    """Yield endless arrival times of the process at a rate of 1."""
    match arrivals.process:
        case Process.CONSTANT:
            phase = rng.random() if shifted else 0.0
            # Multiples, not a running sum: rounding errors do not accumulate.
            yield from (i + phase for i in itertools.count())
        case Process.POISSON:
            yield from itertools.accumulate(rng.expovariate(1.0) for _ in itertools.count())
        case Process.GAMMA:
            shape = 1 / arrivals.cv**2
            scale = 1 / shape
            # The gap that contains time 0 is length-biased (a long one is more likely to contain it), and time 0 is
            # uniform within it.
            first = rng.random() * rng.gammavariate(shape + 1, scale)
            gaps = (rng.gammavariate(shape, scale) for _ in itertools.count())
            yield from itertools.accumulate(itertools.chain([first], gaps))


def _inverse(arrivals: Arrivals, duration: float) -> Callable[[float], float]:
    """Return a function from an expected number of arrivals to the time at which it is reached; infinite if never."""
    rate = arrivals.rate
    match arrivals.pattern:
        case Pattern.STEADY:
            return lambda expected: expected / rate
        case Pattern.ON_OFF:
            return lambda expected: _on_off_time(arrivals, expected)
        case Pattern.RAMP:
            slope = (arrivals.ramp_rate - rate) / duration
            return lambda expected: _ramp_time(rate, slope, expected)


def _on_off_time(arrivals: Arrivals, expected: float) -> float:
    on, off = arrivals.on_seconds * arrivals.rate, arrivals.off_seconds * arrivals.off_rate
    periods, rest = divmod(expected, on + off)
    begin = periods * (arrivals.on_seconds + arrivals.off_seconds)
    if rest <= on or not off:
        return begin + rest / arrivals.rate
    return begin + arrivals.on_seconds + (rest - on) / arrivals.off_rate


def _ramp_time(rate: float, slope: float, expected: float) -> float:
    """Solve `rate * t + slope * t**2 / 2 = expected` for t."""
    root = rate * rate + 2 * slope * expected
    return 2 * expected / (rate + math.sqrt(root)) if root >= 0 else math.inf
