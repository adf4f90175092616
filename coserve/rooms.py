"""What the engine needs of the rooms below it, and the measure that it takes of their work."""

from __future__ import annotations

from typing import Protocol

from coserve.link import FromEngine, Generate, JobCheckpoint, JobStarted, RequestFailed, Tokens
from coserve.types import AdapterRef, JobSpec


class Generates(Protocol):
    """What the engine needs of `generate.Generator`."""

    @property
    def running(self) -> int: ...
    @property
    def pages_used(self) -> int: ...
    @property
    def pages_total(self) -> int: ...
    @property
    def adapter_pages(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def prefix_queries(self) -> int: ...
    @property
    def prefix_hits(self) -> int: ...

    def add(self, request: Generate) -> None: ...
    def cancel(self, id: str) -> None: ...
    def step(self) -> list[Tokens | RequestFailed]: ...
    def land(self) -> list[Tokens | RequestFailed]: ...
    def prepare(self) -> bool: ...


class Trains(Protocol):
    """What the engine needs of `finetune.Trainer`."""

    def start(self, spec: JobSpec) -> JobStarted: ...
    def advance(self, job: str, pieces: int | None) -> list[FromEngine]: ...
    def mid_batch(self, job: str) -> bool: ...
    def checkpoint(self, job: str) -> JobCheckpoint | None: ...
    def drop(self, job: str) -> None: ...


class Adapters(Protocol):
    """What the engine needs of `adapters.Residency`."""

    def drop(self, ref: AdapterRef) -> None: ...
    def resident(self) -> tuple[AdapterRef, ...]: ...


class Upgrades(Protocol):
    """What the engine needs of `generate.start`: work on a thread of its own that makes later steps faster."""

    def compile(self) -> None: ...
    def adopt(self) -> tuple[str, ...]: ...


class Average:
    """Exponentially weighted mean of measured seconds; starts at the first sample, and soon forgets one that was much
    too long: the first steps and slices of a process compile kernels."""

    def __init__(self) -> None:
        self.value = 0.0
        self._seen = False

    def add(self, seconds: float) -> None:
        weight = 0.5 if seconds < self.value / 2 else 0.2
        self.value += weight * (seconds - self.value) if self._seen else seconds
        self._seen = True
