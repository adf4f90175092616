"""The body of `GET /health` and `GET /health/ready`. Times are in seconds."""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol

from coserve.core.gpu_memory import MemoryUse
from coserve.core.types import Wire

EngineStatus = Literal["starting", "ready"]
"""`starting`: no engine answers requests yet, at the first start or at a restart. `ready`: requests are answered, and
everything they need is compiled and captured."""
Status = EngineStatus | Literal["stopping"]
"""The daemon's status: the engine's, or `stopping`: requests in flight may finish, new ones are refused."""


class BaseInfo(Wire, frozen=True):
    name: str
    fingerprint: str
    family: str
    dtype: str
    quantization: str
    """How the linear modules of the layers are stored: fp8, nf4 or none."""
    device: str
    context: int
    vocab: int


class Warming(Wire, frozen=True):
    """Progress of a start."""

    done: int
    total: int
    """Units of work."""
    seconds_left: float | None
    """Estimate; null: not known yet."""
    what: str
    """The current activity, such as "compiling kernels"."""


def warming_line(warming: Warming) -> str:
    """Return a text such as `compiling kernels 12/310, about 40 s left`."""
    left = "" if warming.seconds_left is None else f", about {warming.seconds_left:.0f} s left"
    return f"{warming.what} {warming.done}/{warming.total}{left}"


def starting_line(warming: Warming | None, what: str = "the daemon is starting") -> str:
    """Return a text such as `the daemon is starting: compiling kernels 12/310, about 40 s left`."""
    return what if warming is None else f"{what}: {warming_line(warming)}"


class RankInfo(Wire, frozen=True):
    """One process (tensor-parallel rank) of an engine."""

    rank: int
    state: Literal["starting", "ready", "lost"]
    """`lost`: the engine ends because of this rank. `starting`: at the first start or at a restart."""
    silent: float
    """Seconds since its last report."""
    behind: int
    """Commands that rank 0 has finished and this rank has not."""


class LoraServerInfo(Wire, frozen=True):
    """One LoRA server of an engine (`--lora-server`)."""

    server: int
    state: Literal["starting", "ready"]
    """`starting`: at the first start, or after the loss of a server, when all are started or connected again."""
    starts: int
    """Starts so far, or attempts to connect to one that others use."""
    adapters: int
    """Adapters of which it holds pairs."""
    bytes: int
    """Bytes of these pairs. Engines that share the server have equal ones in memory once."""
    at: str = ""
    """Path of its socket, if several engines use it (`--lora-server-at`)."""
    engines: int = 1
    """Engines that it has, this one included; 0 while it is `starting`."""


class EngineRanks(Protocol):
    """The processes of an engine under tensor parallelism, one per rank."""

    @property
    def loss(self) -> str | None:
        """Return which rank was lost, and how; None if none was."""
        ...

    @property
    def lost(self) -> asyncio.Event:
        """Event that is set once `loss` is known."""
        ...

    def states(self) -> tuple[RankInfo, ...]: ...


class Health(Wire, frozen=True):
    """Body of `GET /health` and `/health/ready`. The HTTP status is 503 while `starting`, else 200; `/health/ready`
    also answers 503 while `stopping`, and if the engine is silent."""

    status: Status
    version: str
    uptime: float
    engine_alive: bool
    engine_restarts: int
    """Restarts after the engine died."""
    base: BaseInfo | None
    lora_backend: str | None
    kv_tokens: int | None
    notes: list[str]
    """Notes for the operator: why there is no engine after a death; what runs slower than it could (training above
    all), and why; which reads or writes fail now and are retried."""
    waiting: int
    running: int
    jobs: int
    """Jobs that are prepared, queued or trained. Paused ones, and those that wait for another job, are left out."""
    adapters_resident: int
    host_adapter_bytes: int = 0
    """Host memory that adapters take."""
    host_adapter_limit: int = 0
    """Budget of adapters that no request uses: `host_adapter_bytes` of the settings, or its default. 0 without an
    engine."""
    warming: Warming | None = None
    """Progress while `status` is `starting`, once the engine reports it."""
    tp: int = 1
    """Number of GPUs that shard the base (`--tp`)."""
    ep: int = 1
    """Number of GPUs among which the experts are divided (`--ep`)."""
    ranks: list[RankInfo] = []
    """State of each rank; empty if `tp` is 1."""
    lora_servers: list[LoraServerInfo] = []
    """State of each LoRA server; empty if `lora_server` is 0."""
    memory: MemoryUse | None = None
    """GPU memory by component, of rank 0 if there are several ranks. Null if memory is not planned: on a CPU, or if
    `kv_tokens` is set."""
    policy: str | None = None
    """The policy in use, also where `--policy` is `auto`; null without an engine."""
    slo_ttft: float | None = None
    slo_tpot: float | None = None
    """Latency targets, in seconds, of interactive requests that bring none; null without an engine."""
