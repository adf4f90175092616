"""A link within a process, between an API and an engine that a test or a benchmark runs together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic

from coserve.core.link.link import FromEngine, InT, OutT, PeerLost, ToEngine


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
