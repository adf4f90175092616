"""One adapter version as the store knows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from coserve.core.types import AdapterDigests, AdapterRef
from coserve.memory.pages import Span
from coserve.model.lora import LoraWeights


class State(Enum):
    """Where the copy of an adapter is that is closest to the kernels."""

    DISK = "disk"
    READING = "reading"
    HOST = "host"
    GPU = "gpu"

    @property
    def in_memory(self) -> bool:
        return self in (State.HOST, State.GPU)


@dataclass(frozen=True)
class GpuCopy:
    """An adapter whose matrices are views of a span of the pool's pages."""

    weights: LoraWeights
    span: Span


@dataclass(eq=False)
class Entry:
    """An adapter version that has a copy in memory, is being read, or is referenced."""

    ref: AdapterRef
    digests: AdapterDigests | None = None
    """What the adapter's files are checked against."""
    host: LoraWeights | None = None
    gpu: GpuCopy | None = None
    size: int = 0
    """Bytes of a copy, once there was one (`packing.packed_bytes`)."""
    reading: bool = False
    failure: Exception | None = None
    """Why there will be no further copy, while requests still use or await one."""
    references: int = 0
    """Requests that acquired it and have not released it."""
    waiting: int = 0
    """Requests that wait until it is read."""
    deleted: bool = False
    """Its files are gone. Requests that acquired it keep it; nobody acquires it any more."""

    temporary: bool = False
    """It never had files: its host copy stays until it is dropped."""

    @property
    def state(self) -> State:
        if self.gpu is not None:
            return State.GPU
        if self.host is not None:
            return State.HOST
        return State.READING if self.reading else State.DISK

    @property
    def idle(self) -> bool:
        """No request needs it, and it can be read again: its host copy may be evicted."""
        return not (self.references or self.waiting or self.temporary)
