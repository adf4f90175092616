"""Both directions of messages between the API process and the engine.

A `Link` is one end of a duplex channel of messages; `channel` has the ends of two processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from coserve.core.link import engine, jobs
from coserve.core.link.generation import Admitted, CancelRequest, Generate, RequestFailed, Tokens
from coserve.core.link.stats import EngineStats

ToEngine = (
    Generate
    | CancelRequest
    | jobs.StartJob
    | jobs.PauseJob
    | jobs.ResumeJob
    | jobs.CancelJob
    | jobs.OpenSession
    | jobs.CallSession
    | engine.DropAdapter
    | engine.PrefetchAdapter
    | engine.SetLogLevel
    | jobs.SnapshotDone
    | engine.Shutdown
)
FromEngine = (
    engine.EngineReady
    | engine.EngineNotes
    | engine.EngineWarming
    | engine.EngineRefused
    | Admitted
    | Tokens
    | RequestFailed
    | jobs.JobStarted
    | jobs.JobPaused
    | jobs.JobProgress
    | jobs.JobCheckpoint
    | jobs.JobSnapshot
    | jobs.JobNote
    | jobs.JobWaiting
    | jobs.JobSucceeded
    | jobs.JobFailed
    | jobs.JobCancelled
    | jobs.CallDone
    | jobs.CallFailed
    | EngineStats
    | engine.EngineStopped
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
