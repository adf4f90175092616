"""Schemas that belong to no single request: error bodies, `GET /`, the history, and the end of a stream."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from coserve.core.types import Wire


class Pointers(Wire, frozen=True):
    """The response of `GET /`: links to the documentation."""

    version: str
    docs: dict[str, str]
    """Maps pages in the project's repository to what they are about."""
    name: str = "coserve"
    health: str = "/health"
    openapi: str = "/openapi.json"


class HistoryPoint(Wire, frozen=True):
    """One report of the engine. Steps, batches and seconds are totals since the engine started."""

    at: float
    """Unix seconds."""
    waiting: int
    running: int
    """Sequences in the queue, and in the batch."""
    jobs: int
    generation_steps: int
    training_batches: int
    serve_seconds: float
    """Seconds in generation steps."""
    train_seconds: float
    """Seconds in training slices."""
    pages_used: int
    pages_adapters: int
    pages_total: int
    memory: dict[str, int]
    """Bytes of GPU memory by component, as in `Health.memory`; empty if memory is not planned."""


class History(Wire, frozen=True):
    """The response of `GET /history`: up to 900 reports. The engine reports once a second while it works, and after
    changes of state."""

    data: list[HistoryPoint]
    now: float
    """Unix seconds of the daemon's clock."""


STREAM_END = "[DONE]"


class ErrorInfo(Wire, frozen=True):
    """An error. `field` names the wrong field of the request; `line` is the wrong row of a corpus."""

    code: str
    message: str
    field: str | None = None
    line: int | UnsetType = UNSET


class ErrorBody(Wire, frozen=True):
    """The body of every response that is not 2xx."""

    error: ErrorInfo
