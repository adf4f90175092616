"""Both directions of messages between the API process and the engine.

A `Link` is one end of a duplex channel of messages. `local_pair` joins two ends in one process; for two processes see
`channel`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

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


class LocalLink(Generic[OutT, InT]):
    """One end of a link within a process."""

    def __init__(self, outbox: asyncio.Queue[OutT | None], inbox: asyncio.Queue[InT | None]) -> None:
        self._outbox, self._inbox = outbox, inbox

    @property
    def backlog(self) -> int:
        return 0

    def send(self, message: OutT) -> None:
        self._outbox.put_nowait(message)

    def send_all(self, messages: Sequence[OutT]) -> None:
        for message in messages:
            self.send(message)

    async def receive(self) -> InT:
        message = await self._inbox.get()
        if message is None:
            self._inbox.put_nowait(None)
            raise PeerLost("the other end of the link closed")
        return message

    async def close(self) -> None:
        self._outbox.put_nowait(None)


def local_pair() -> tuple[LocalLink[ToEngine, FromEngine], LocalLink[FromEngine, ToEngine]]:
    """Return the API's end and the engine's end of a link within a process."""
    to_engine: asyncio.Queue[ToEngine | None] = asyncio.Queue()
    from_engine: asyncio.Queue[FromEngine | None] = asyncio.Queue()
    return LocalLink(to_engine, from_engine), LocalLink(from_engine, to_engine)
