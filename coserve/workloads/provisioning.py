"""Plans LoRA servers: how many GPUs, besides the engines', can hold the adapters of a mixture of experts and compute
their terms within a TPOT (InfiniLoRA, section 4.2.2). A model of bytes and latencies, not a measurement.

Experts are divided among EP GPUs, layers among PP groups of them. A layer's activations of one engine go to the group
that has the layer, to one GPU after another, and the terms come back. More EP divides the pairs that a layer reads, and
costs further messages; more PP lets several engines be served at once.

Also computes how many adapters must fit on the GPUs so that requests are admitted at once: InfiniLoRA's Algorithm 1
(Chen et al. 2026, section 4.2.1), in O(N²) for one capacity instead of O(N³). N adapters, `shares[i]` of the requests
are for adapter i. B requests run at a time, in all engines; the number of them that are for adapter i is taken as
Poisson with mean B `shares[i]`. A request is admitted at once if its adapter is resident, or else if a slot is free.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coserve.core.errors import InvalidRequest
from coserve.core.types import Wire

ITEM = 2
"""Bytes of an element, in 16 bits."""


@dataclass(frozen=True)
class MoeShape:
    """Sizes of a mixture of experts."""

    layers: int
    hidden: int
    inner: int
    """Intermediate size of an expert."""
    experts: int
    chosen: int
    """Experts that compute a token."""

    def adapter_bytes(self, rank: int) -> int:
        """Return the bytes of an adapter with a pair at each expert's gate and up, and down."""
        pairs = (self.hidden + 2 * self.inner) + (self.inner + self.hidden)
        return ITEM * self.layers * self.experts * rank * pairs

    def token_bytes(self, ep: int = 1) -> tuple[int, int]:
        """Return the bytes that a token sends in one layer (the inputs of both parameters) and receives (terms of gate
        and up, and the sum of those of down). Each of `ep` GPUs gets all inputs, and returns zeros for experts that it
        has not."""
        sent, back = self.hidden + self.chosen * self.inner, self.chosen * 2 * self.inner + self.hidden
        return ITEM * ep * sent, ITEM * ep * back

    def active_pairs(self, shares: Sequence[float], batch: float) -> float:
        """Return how many (adapter, expert) pairs a step of `batch` tokens is expected to read in one layer."""
        each = batch * self.chosen / self.experts
        return self.experts * sum(-math.expm1(-each * share) for share in shares)


class Hardware(Wire, frozen=True):
    """Speeds of one GPU."""

    memory: float
    """Bytes for adapters."""
    bandwidth: float = 3.35e12
    """Bytes a second that a kernel reads of its own memory."""
    link: float = 300e9
    """Bytes a second in one direction between an engine and the others."""
    latency: float = 10e-6
    """Seconds of a message or of a kernel, in each of a layer's two rounds."""


class ServerPlan(Wire, frozen=True):
    """A number of GPUs, and how experts (`ep`) and layers (`pp`) are divided among them."""

    gpus: int
    ep: int
    pp: int
    receive: float
    """Seconds per layer and step of one engine; `compute` and `send` likewise."""
    compute: float
    send: float
    bound: str
    """The limit that decided the number of GPUs: `memory`, `tpot` or `load`."""


def plan_servers(
    shape: MoeShape,
    rank: int,
    capacity: int,
    shares: Sequence[float],
    *,
    batch: int,
    engines: int,
    tpot: float,
    hardware: Hardware,
    most: int = 64,
    overlap: float = 0.5,
) -> ServerPlan:
    """Return the fewest GPUs that hold `capacity` adapters and return their terms in time, and the EP and PP with the
    shortest time.

    `batch`: tokens of an engine's decode step; `tpot`: seconds between tokens; `overlap`: fraction of a layer's time in
    which the experts' products run, overlapped with the terms (equation 5); all engines must be served within a layer's
    time, PP groups at once (equation 6). Raises `InvalidRequest` if no choice up to `most` GPUs suffices.
    """
    held = math.ceil(capacity * shape.adapter_bytes(rank) / hardware.memory)
    layer = tpot / shape.layers
    read = shape.active_pairs(shares, batch) * shape.adapter_bytes(rank) / (shape.layers * shape.experts)
    bound = "memory"
    if held > most:
        size = f"{capacity} adapters of {shape.adapter_bytes(rank) / 1e9:.2f} GB"
        raise InvalidRequest(f"{size} need {held} GPUs, expected at most {most}", field="gpu_gb")
    for gpus in range(max(1, held), most + 1):
        in_time = []
        for ep in (ep for ep in range(1, gpus + 1) if gpus % ep == 0 and shape.experts % ep == 0):
            pp = gpus // ep
            if pp > shape.layers:
                continue
            up, down = (batch * size for size in shape.token_bytes(ep))
            times = (
                2 * ep * hardware.latency + up / hardware.link,
                2 * hardware.latency + read / ep / hardware.bandwidth,
                2 * hardware.latency + down / hardware.link,
            )
            if sum(times) <= overlap * layer:
                in_time.append(ServerPlan(gpus, ep, pp, *times, bound=bound))
        found = [one for one in in_time if max(one.receive, one.compute, one.send) * engines / one.pp <= layer]
        if found:
            return min(found, key=lambda one: one.receive + one.compute + one.send)
        bound = "load" if in_time else "tpot"
    if bound == "load":
        turn = f"within the {layer * 1e6:.0f} microseconds of a layer"
        raise InvalidRequest(f"no {most} GPUs serve {engines} engines {turn}", field="engines")
    up, down = (batch * size for size in shape.token_bytes())
    raise InvalidRequest(
        f"no {most} GPUs return the terms within {overlap * layer * 1e6:.0f} microseconds a layer: sending takes "
        f"{up / hardware.link * 1e6:.0f}, receiving {down / hardware.link * 1e6:.0f}, and each of six messages and "
        f"kernels {hardware.latency * 1e6:.0f}",
        field="tpot",
    )


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
