"""Both directions of messages between the API process and the engine.

A `Link` is one end of a duplex channel of messages; `channel` has the ends of two processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from coserve.core.link.engine import (
    DropAdapter,
    EngineNotes,
    EngineReady,
    EngineRefused,
    EngineStopped,
    EngineWarming,
    PrefetchAdapter,
    SetLogLevel,
    Shutdown,
)
from coserve.core.link.generation import Admitted, CancelRequest, Generate, RequestFailed, Tokens
from coserve.core.link.jobs import (
    CancelJob,
    JobCancelled,
    JobCheckpoint,
    JobFailed,
    JobNote,
    JobPaused,
    JobProgress,
    JobSnapshot,
    JobStarted,
    JobSucceeded,
    JobWaiting,
    PauseJob,
    ResumeJob,
    SnapshotDone,
    StartJob,
)
from coserve.core.link.sessions import CallDone, CallFailed, CallSession, OpenSession
from coserve.core.link.stats import EngineStats

ToEngine = (
    Generate
    | CancelRequest
    | StartJob
    | PauseJob
    | ResumeJob
    | CancelJob
    | OpenSession
    | CallSession
    | DropAdapter
    | PrefetchAdapter
    | SetLogLevel
    | SnapshotDone
    | Shutdown
)
FromEngine = (
    EngineReady
    | EngineNotes
    | EngineWarming
    | EngineRefused
    | Admitted
    | Tokens
    | RequestFailed
    | JobStarted
    | JobPaused
    | JobProgress
    | JobCheckpoint
    | JobSnapshot
    | JobNote
    | JobWaiting
    | JobSucceeded
    | JobFailed
    | JobCancelled
    | CallDone
    | CallFailed
    | EngineStats
    | EngineStopped
)
OutT = TypeVar("OutT")
InT = TypeVar("InT")
Out_contra = TypeVar("Out_contra", contravariant=True)
In_co = TypeVar("In_co", covariant=True)


class PeerLost(ConnectionError):
    """The other end of a link or channel is closed, or its process has ended."""


class Link(Protocol[Out_contra, In_co]):
    """One end of a link. `send` never blocks and keeps the order. `receive` raises `PeerLost` when the peer is gone."""

    @property
    def backlog(self) -> int:
        """Return the bytes sent that are still buffered in this process."""
        ...

    def send(self, message: Out_contra) -> None: ...

    def send_all(self, messages: Sequence[Out_contra]) -> None:
        """Send all messages in order, with one write."""
        ...

    async def receive(self) -> In_co: ...

    async def close(self) -> None: ...
