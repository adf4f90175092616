"""Plans LoRA servers: how many GPUs, besides the engines', can hold the adapters of a mixture of experts and compute
their terms within a TPOT (InfiniLoRA, section 4.2.2). A model of bytes and latencies, not a measurement.

Experts are divided among EP GPUs, layers among PP groups of them. A layer's activations of one engine go to the group
that has the layer, to one GPU after another, and the terms come back. More EP divides the pairs that a layer reads, and
costs further messages; more PP lets several engines be served at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
        found = []
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
            if sum(times) > overlap * layer:
                bound = "tpot"
            elif max(times) * engines / pp > layer:
                bound = "load"
            else:
                found.append(ServerPlan(gpus, ep, pp, *times, bound=bound))
        if found:
            return min(found, key=lambda one: one.receive + one.compute + one.send)
    up, down = (batch * size for size in shape.token_bytes())
    raise InvalidRequest(
        f"no {most} GPUs return the terms within {overlap * layer * 1e6:.0f} microseconds a layer: sending takes "
        f"{up / hardware.link * 1e6:.0f}, receiving {down / hardware.link * 1e6:.0f}, and each of six messages and "
        f"kernels {hardware.latency * 1e6:.0f}",
        field="tpot",
    )
