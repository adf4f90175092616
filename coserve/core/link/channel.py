"""Channels for messages between two processes over a connected socket, and the child process at the other end.

A frame is the length (4 bytes, big endian), then one msgpack message. Nothing is ever pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Generic, Self

import msgspec

from coserve.core.cancellation import uncancelled
from coserve.core.link.link import FromEngine, InT, OutT, PeerLost, ToEngine
from coserve.core.processes import signal_child, start_child

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 28
"""Maximum bytes of a message; a longer length means that something else was written to the socket."""
READ_AHEAD = 1 << 20
"""Bytes that an `AsyncChannel` buffers before it stops to read from the socket."""
TURN_BYTES = 1 << 16
"""Bytes of messages that an `AsyncChannel` receives before it yields to the event loop."""
PIECE = 1 << 18
"""Bytes that `AsyncChannel.send_bytes` copies at once."""


def frame(encoder: msgspec.msgpack.Encoder, message: object) -> bytes:
    """Encode a message with its length prefix."""
    body = encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


def _size(prefix: bytes) -> int:
    """Return the length of a message. Raises `PeerLost` for what is no message."""
    if (size := int.from_bytes(prefix, "big")) > MAX_BYTES:
        log.error("expected a message of another process, got %r", prefix)
        raise PeerLost("unreadable message")
    return size


def _decoded(decoder: msgspec.msgpack.Decoder[InT], body: bytes) -> InT:
    """Decode a message. An unreadable one counts as the peer's end, since what follows is as unreadable."""
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        log.exception("a message of another process cannot be read")
        raise PeerLost("unreadable message") from error


class Channel(Generic[OutT, InT]):
    """A blocking end. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[InT]) -> None:
        sock.setblocking(True)
        self._socket, self._decoder = sock, decoder
        self._reader = sock.makefile("rb")
        self._encoder, self._sending = msgspec.msgpack.Encoder(), threading.Lock()

    def limit_sends(self, seconds: float) -> None:
        """Have `send` raise `PeerLost`, too, when the other end has read nothing for so long."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: OutT) -> None:
        """Send a message in one write. Blocks while the other end reads too slowly. Raises `PeerLost`."""
        with self._sending:
            self.send_frame(frame(self._encoder, message))

    def send_frame(self, data: bytes) -> None:
        """Send a message that `frame` encoded. Not thread-safe. Raises `PeerLost`."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise PeerLost from error

    def receive(self) -> InT:
        """Receive the next message. Raises `PeerLost`."""
        try:
            size = _size(self._exactly(4))
            return _decoded(self._decoder, self._exactly(size))
        except OSError as error:
            raise PeerLost from error

    def receive_bytes(self, size: int) -> bytes:
        """Receive what `AsyncChannel.send_bytes` sent. Raises `PeerLost`."""
        try:
            return self._exactly(size)
        except OSError as error:
            raise PeerLost from error

    def close(self) -> None:
        """Close the channel; call it on the receiving thread."""
        self._reader.close()
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        data = self._reader.read(size)
        if len(data) < size:
            raise PeerLost
        return data


class AsyncChannel(Generic[OutT, InT]):
    """An end on an event loop, a `Link`. Messages that do not fit into the socket's buffer are queued here and sent
    when the peer reads; `send` never blocks."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[InT]
    ) -> None:
        self._reader, self._writer, self._decoder = reader, writer, decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._received = 0
        """Bytes received since the last yield to the event loop."""

    @classmethod
    async def open(cls, sock: socket.socket, decoder: msgspec.msgpack.Decoder[InT]) -> AsyncChannel[OutT, InT]:
        return cls(*await asyncio.open_connection(sock=sock, limit=READ_AHEAD), decoder)

    @property
    def backlog(self) -> int:
        """Return the bytes sent that are still buffered in this process."""
        return self._writer.transport.get_write_buffer_size()

    @property
    def at_end(self) -> bool:
        """Whether the peer is known to have closed, and everything is received."""
        return self._reader.at_eof()

    def send(self, message: OutT) -> None:
        self._writer.write(frame(self._encoder, message))

    async def send_bytes(self, data: bytes) -> None:
        """Send many bytes between two messages, as fast as the peer reads, so that copies of all of them at once do not
        hold the event loop. Until they are sent, nothing else may be. As with `send`, a lost peer is seen by
        `receive`."""
        with contextlib.suppress(ConnectionError):
            for first in range(0, len(data), PIECE):
                self._writer.write(data[first : first + PIECE])
                await self._writer.drain()

    def send_all(self, messages: Sequence[OutT]) -> None:
        if messages:
            self._writer.write(b"".join(frame(self._encoder, message) for message in messages))

    async def receive(self) -> InT:
        try:
            if self._received >= TURN_BYTES:  # a read that the buffer satisfies does not yield
                self._received = 0
                await asyncio.sleep(0)
            size = _size(await self._reader.readexactly(4))
            self._received += size
            return _decoded(self._decoder, await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise PeerLost("the other end of the link closed") from error

    async def close(self) -> None:
        """Close this end once everything is sent."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):  # the peer has closed first
            await self._writer.wait_closed()


async def api_end(sock: socket.socket) -> AsyncChannel[ToEngine, FromEngine]:
    return await AsyncChannel[ToEngine, FromEngine].open(sock, msgspec.msgpack.Decoder(FromEngine))


async def engine_end(sock: socket.socket) -> AsyncChannel[FromEngine, ToEngine]:
    return await AsyncChannel[FromEngine, ToEngine].open(sock, msgspec.msgpack.Decoder(ToEngine))


class WorkerProcess(Generic[OutT, InT]):
    """A child process and the channel to it."""

    def __init__(self, process: asyncio.subprocess.Process, channel: AsyncChannel[OutT, InT]) -> None:
        self._process, self.channel = process, channel

    @classmethod
    async def start(
        cls,
        module: str,
        decoder: msgspec.msgpack.Decoder[InT],
        *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Run `python -m MODULE FD ARGUMENTS…`, where FD is its end of the channel; see `start_child`. Raises
        `OSError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            channel = await AsyncChannel[OutT, InT].open(ours, decoder)
            try:
                process = await start_child(module, theirs, *arguments, environment=environment)
            except BaseException:
                await uncancelled(asyncio.create_task(channel.close()))
                raise
        return cls(process, channel)

    @property
    def alive(self) -> bool:
        """False once the end of the process is known."""
        return not self.channel.at_end

    async def receive(self, timeout: float | None = None) -> InT:  # noqa: ASYNC109 - one deadline for a whole message
        """Return the next message. Raises `PeerLost` if the process has ended, and `TimeoutError` if it is silent for
        `timeout` seconds."""
        async with asyncio.timeout(timeout):
            return await self.channel.receive()

    async def end(self, grace: float = 0.0) -> int:
        """Close the channel, kill the process after `grace` seconds, and wait for its end. Returns its exit status:
        minus the number of the first signal that ended it."""
        if grace:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self.channel.close()
                    await self._process.wait()
        signal_child(self._process, signal.SIGKILL)
        await self.channel.close()
        return await self._process.wait()
