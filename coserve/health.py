"""The body of `GET /health` and `GET /health/ready`. Times are in seconds."""

from __future__ import annotations

from typing import Literal

from coserve.types import Wire

Status = Literal["starting", "warming", "ready"]
"""`starting`: no engine answers requests, before the first one or during a restart; `warming`: requests are answered, but kernels
and graphs are still being compiled and captured; `ready`: all of them are there."""


class BaseInfo(Wire, frozen=True):
    name: str
    fingerprint: str
    family: str
    dtype: str
    device: str
    context: int
    vocab: int


class Warming(Wire, frozen=True):
    """Progress of the warm-up."""

    done: int
    total: int
    """Kernels, layers and graphs that are compiled or captured, and how many there will be; 0 of 0: not known yet."""
    seconds_left: float | None
    """Estimated; null: not known yet."""


class Health(Wire, frozen=True):
    """HTTP status 503 while `starting`, 200 otherwise; `/health/ready` has the same body, and 503 while `warming` too unless the
    daemon runs with `--ready-when listening`."""

    status: Status
    version: str
    uptime: float
    engine_alive: bool
    engine_restarts: int
    """How often it was started again after it died."""
    base: BaseInfo | None
    lora_way: str | None
    kv_tokens: int | None
    notes: list[str]
    """Why there is no engine, if one died; what runs slower than it could, and why, training above all; what cannot be read or
    written now and is tried again."""
    waiting: int
    running: int
    jobs: int
    adapters_resident: int
    warming: Warming | None = None
    """Only while `status` is `warming`."""
