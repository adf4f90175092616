"""The body of `GET /health` and `GET /health/ready`. Times are in seconds."""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol

from coserve.core.gpu_memory import MemoryUse
from coserve.core.types import Wire

Status = Literal["starting", "ready"]
"""`starting`: no engine answers requests, before the first one or during a restart; `ready`: requests are answered, and
everything that they need is compiled and captured."""


class BaseInfo(Wire, frozen=True):
    name: str
    fingerprint: str
    family: str
    dtype: str
    device: str
    context: int
    vocab: int


class Warming(Wire, frozen=True):
    """How far a start is."""

    done: int
    total: int
    """Units of work."""
    seconds_left: float | None
    """Estimated; null: not known yet."""
    what: str
    """What is done now, as in "compiling kernels"."""


def warming_line(warming: Warming) -> str:
    """`compiling kernels 12/310, about 40 s left`."""
    left = "" if warming.seconds_left is None else f", about {warming.seconds_left:.0f} s left"
    return f"{warming.what} {warming.done}/{warming.total}{left}"


def starting_line(warming: Warming | None, what: str = "the daemon is starting") -> str:
    """`the daemon is starting: compiling kernels 12/310, about 40 s left`."""
    return what if warming is None else f"{what}: {warming_line(warming)}"


class RankInfo(Wire, frozen=True):
    """One process of an engine under tensor parallelism."""

    rank: int
    state: Literal["starting", "ready", "lost"]
    """`lost`: the engine ends because of it; `starting`: also while it is being started again."""
    silent: float
    """Seconds since it was last heard of."""
    behind: int
    """Commands that rank 0 has finished and it has not."""


class EngineRanks(Protocol):
    """The processes of an engine under tensor parallelism."""

    @property
    def loss(self) -> str | None:
        """Which rank was lost, and how; None: none."""
        ...

    @property
    def lost(self) -> asyncio.Event:
        """Set when `loss` is known."""
        ...

    def states(self) -> tuple[RankInfo, ...]: ...


class Health(Wire, frozen=True):
    """HTTP status 503 while `starting`, 200 otherwise; `/health/ready` has the same body, and 503 of an engine that
    says nothing, too."""

    status: Status
    version: str
    uptime: float
    engine_alive: bool
    engine_restarts: int
    """How often it was started again after it died."""
    base: BaseInfo | None
    lora_backend: str | None
    kv_tokens: int | None
    notes: list[str]
    """Why there is no engine, if one died; what runs slower than it could, and why, training above all; what cannot be
    read or written now and is tried again."""
    waiting: int
    running: int
    jobs: int
    adapters_resident: int
    warming: Warming | None = None
    """While `status` is `starting`, once the engine says how far it is."""
    tp: int = 1
    """GPUs that share the base (`--tp`)."""
    ranks: list[RankInfo] = []
    """Empty if `tp` is 1."""
    memory: MemoryUse | None = None
    """Where the bytes of the GPU are, of rank 0's if there are several; null where memory is not planned: on a CPU, and
    where `kv_tokens` is set."""
    policy: str | None = None
    """The one that `--policy` stands for; null without an engine."""
