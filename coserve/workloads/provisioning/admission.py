"""Computes how many adapters must fit on the GPUs so that requests are admitted at once: InfiniLoRA's Algorithm 1 (Chen
et al. 2026, section 4.2.1), in O(N²) for one capacity instead of O(N³).

N adapters, `shares[i]` of the requests are for adapter i. B requests run at a time, in all engines; the number of them
that are for adapter i is taken as Poisson with mean B `shares[i]`. A request is admitted at once if its adapter is
resident, or else if a slot is free.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from coserve.core.errors import InvalidRequest

Floats = npt.NDArray[np.float64]


def residency(shares: Sequence[float], batch: float, capacity: int, *, keeps_idle: bool = False) -> Floats:
    """Return the probability that each adapter is resident (N).

    An adapter is resident if more than τ running requests are for it. τ is such that `capacity` adapters are expected
    (equation 3); between two whole numbers, the larger one applies with the probability that makes it so.
    `keeps_idle=False`: τ is at least 0, as an engine evicts an adapter that no request uses when another one needs its
    slot. With `keeps_idle`, as in the paper, adapters that nobody uses hold their slots.
    """
    rates = batch * _checked(shares)
    above, upper = _above(rates), np.ones(len(rates))
    lower = next(above)
    if lower.sum() <= capacity and not keeps_idle:
        return lower
    if capacity >= len(rates):
        return upper
    while lower.sum() > capacity:
        upper, lower = lower, next(above)
    part = (capacity - lower.sum()) / (upper.sum() - lower.sum())
    return np.asarray(lower + part * (upper - lower))


def immediate_admission(shares: Sequence[float], batch: float, capacity: int, *, keeps_idle: bool = False) -> float:
    """Return the fraction of requests that are admitted at once with room for `capacity` adapters (equation 4).

    O(N²): the distribution of the number of occupied slots is found once, and each adapter is divided out of it.
    """
    if capacity < 1:
        return 0.0
    resident = residency(shares, batch, capacity, keeps_idle=keeps_idle)
    free = below_without_each(resident, capacity)
    return float(np.sum(_checked(shares) * (resident + (1 - resident) * free)))


def least_capacity(shares: Sequence[float], batch: float, target: float, *, keeps_idle: bool = False) -> int:
    """Return the fewest adapters that must fit so that `target` of the requests are admitted at once (equation 1)."""
    if not 0 < target <= 1:
        raise InvalidRequest(f"expected a share of requests above 0 and at most 1, got {target}", field="target")
    low, high = 0, len(shares)  # high suffices: every adapter fits
    while high - low > 1:
        middle = (low + high) // 2
        if immediate_admission(shares, batch, middle, keeps_idle=keeps_idle) >= target:
            high = middle
        else:
            low = middle
    return high


def occupied(chances: Floats) -> Floats:
    """Return the distribution of the number of events of these chances that happen (Poisson binomial): (N + 1)."""
    found = np.ones(1)
    for chance in chances:
        found = np.append(found * (1 - chance), 0.0) + np.append(0.0, found * chance)
    return found


def below_without_each(chances: Floats, limit: int) -> Floats:
    """Return for each event the probability that fewer than `limit` of the others happen (N).

    The event is divided out of the distribution of all: upwards from 0 where its chance is at most one half, otherwise
    downwards from N, as either recursion is stable only there.
    """
    whole, count = occupied(chances), len(chances)
    rare = chances <= 0.5
    one, other = chances[rare], chances[~rare]
    found = np.empty(count)
    part, total = np.zeros(len(one)), np.zeros(len(one))
    for k in range(min(limit, count)):
        part = (whole[k] - one * part) / (1 - one)
        total += part
    found[rare] = total
    part, total = np.zeros(len(other)), np.zeros(len(other))
    for k in range(count, limit, -1):  # part: probability of k - 1 of the others
        part = (whole[k] - (1 - other) * part) / other
        total += part
    found[~rare] = 1 - total
    return np.clip(found, 0.0, 1.0)


def _above(rates: Floats) -> Iterator[Floats]:
    """Yield Pr[Poisson(rate) > k] for each rate, for k = 0, 1, 2, ..."""
    logs, below = np.log(np.maximum(rates, np.finfo(np.float64).tiny)), np.zeros(len(rates))
    for k in itertools.count():
        below = below + np.exp(k * logs - rates - math.lgamma(k + 1))  # exp(-rate) alone may be 0
        yield np.clip(1 - below, 0.0, 1.0)


def _checked(shares: Sequence[float]) -> Floats:
    found = np.asarray(shares, np.float64)
    if not len(found) or found.min() < 0 or not found.sum() > 0:
        raise InvalidRequest("expected at least one adapter with requests", field="adapters")
    return np.asarray(found / found.sum())
