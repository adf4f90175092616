"""A link between two processes: length-prefixed msgpack frames over a connected socket. Nothing is ever pickled."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Generic

import msgspec

from coserve.core.errors import EngineUnavailable
from coserve.core.link import FromEngine, InT, OutT, ToEngine

ALIVE = 10.0
"""Maximum seconds between two messages of an engine that has work, unless a single step or slice takes longer."""
TURN_BYTES = 1 << 16
"""Bytes of messages that a `StreamLink` receives before it yields to the event loop."""


class StreamLink(Generic[OutT, InT]):
    """One end of a link over a connected socket. Frame: 4 bytes of length (big endian), then one msgpack message.

    Messages that do not fit into the socket's buffer are queued here and sent when the peer reads; `send` never blocks.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[InT]
    ) -> None:
        self._reader, self._writer, self._decoder = reader, writer, decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._received = 0
        """Bytes received since the last yield to the event loop."""

    @property
    def backlog(self) -> int:
        """Return the bytes sent that are still buffered in this process."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: OutT) -> None:
        self._writer.write(self._frame(message))

    def send_all(self, messages: Sequence[OutT]) -> None:
        if messages:
            self._writer.write(b"".join(map(self._frame, messages)))

    def _frame(self, message: OutT) -> bytes:
        body = self._encoder.encode(message)
        return len(body).to_bytes(4, "big") + body

    async def receive(self) -> InT:
        try:
            if self._received >= TURN_BYTES:  # a read that the buffer satisfies does not yield
                self._received = 0
                await asyncio.sleep(0)
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            self._received += size
            return self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EngineUnavailable("the other end of the link closed") from error

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):  # the peer has closed first
            await self._writer.wait_closed()


async def api_end(sock: socket.socket) -> StreamLink[ToEngine, FromEngine]:
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
    return StreamLink(reader, writer, msgspec.msgpack.Decoder(FromEngine))


async def engine_end(sock: socket.socket) -> StreamLink[FromEngine, ToEngine]:
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
    return StreamLink(reader, writer, msgspec.msgpack.Decoder(ToEngine))
