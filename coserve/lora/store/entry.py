"""One adapter version as the store knows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from coserve.core.types import AdapterDigests, AdapterRef
from coserve.memory.pages import Span
from coserve.model.lora import LoraWeights


class State(Enum):
    """The fastest tier that holds an adapter."""

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
    """Digests that the adapter's files are checked against."""
    host: LoraWeights | None = None
    gpu: GpuCopy | None = None
    size: int = 0
    """Bytes of a copy (`packing.packed_bytes`); 0 before the first one."""
    without_experts: int = 0
    """Bytes of a copy without its experts' pairs."""
    reading: bool = False
    failure: Exception | None = None
    """Why the adapter will not be read (again), for requests that use it or wait for it: a failed read, or deletion."""
    references: int = 0
    """Requests that have acquired the adapter and not released it."""
    waiting: int = 0
    """Requests that wait until it is read."""
    deleted: bool = False
    """Whether its files are gone. Requests that acquired it keep it; no other request can acquire it."""

    temporary: bool = False
    """Whether it never had files: its host copy stays until it is dropped."""
    pinned: bool = False
    """Whether a user wants its host copy to stay."""
    lacks_pages_since: float | None = None
    """When a request first lacked pages for it; None: none does."""

    @property
    def state(self) -> State:
        if self.gpu is not None:
            return State.GPU
        if self.host is not None:
            return State.HOST
        return State.READING if self.reading else State.DISK

    @property
    def in_memory(self) -> bool:
        """`state.in_memory`, ten times faster: once a second the engine asks each of thousands of adapters."""
        return self.gpu is not None or self.host is not None

    @property
    def idle(self) -> bool:
        """Whether no request needs it and its files can be read again, so that its host copy may be evicted."""
        return not (self.references or self.waiting or self.temporary or self.pinned)
