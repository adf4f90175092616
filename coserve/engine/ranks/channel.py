"""Blocking message channel between two ranks over a connected socket: a 4-byte length (big endian), then one msgpack
message."""

from __future__ import annotations

import socket
import threading
from typing import Generic, TypeVar

import msgspec

OutT = TypeVar("OutT")
InT = TypeVar("InT")


class PeerLost(Exception):
    """The process at the other end is gone."""


class Channel(Generic[OutT, InT]):
    """One end of a channel. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[InT]) -> None:
        sock.setblocking(True)
        self._socket, self._decoder = sock, decoder
        self._reader = sock.makefile("rb")
        self._encoder, self._sending = msgspec.msgpack.Encoder(), threading.Lock()

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
            size = int.from_bytes(self._exactly(4), "big")
            return self._decoder.decode(self._exactly(size))
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


def frame(encoder: msgspec.msgpack.Encoder, message: object) -> bytes:
    """Encode a message with its length prefix."""
    body = encoder.encode(message)
    return len(body).to_bytes(4, "big") + body
