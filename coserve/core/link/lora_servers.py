"""LoRA servers that several engines use: their settings, where they listen, and what both ends say first.

Greetings are read from the socket itself: a `Channel` would take the bytes after them into its buffer, and drop the
files that come with them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec import Struct

from coserve import __version__
from coserve.core.link.channel import frame
from coserve.core.link.link import PeerLost
from coserve.core.logs import LogSettings

PROTOCOL = 3
"""Number of the messages between an engine and a LoRA server, and of the way their tensors go. Raise it with every
change of these: versions of coserve that are not released have one name."""
HELLO_BYTES = 1 << 12
"""Most bytes of a greeting."""
REFUSED = 2
"""Exit status of a server whose settings do not fit this machine."""


class ListenerSettings(Struct, frozen=True, kw_only=True):
    """The settings of one server."""

    index: int = 0
    servers: int
    """Servers of the folder."""
    device: str
    """auto, cuda or cpu."""
    logs: LogSettings


class Hello(Struct, frozen=True, kw_only=True):
    """The first frame of either end. Its form stays the same in all versions, so that they understand each other so
    far."""

    version: str = __version__
    protocol: int = PROTOCOL

    def __str__(self) -> str:
        return f"coserve {self.version}, protocol {self.protocol}"


def socket_path(folder: Path, index: int) -> Path:
    """Return the path of the socket at which a server listens."""
    return folder / str(index)


def send_hello(sock: socket.socket, files: Sequence[int] = ()) -> None:
    """Send this process's greeting, and file descriptors. Raises `OSError`."""
    socket.send_fds(sock, [frame(msgspec.msgpack.Encoder(), Hello())], files)


def receive_hello(sock: socket.socket) -> tuple[Hello, list[int]]:
    """Return the other end's greeting, and the file descriptors that came with it, which the caller closes. Raises
    `PeerLost` if the other end closes the socket, or sends anything else, and `OSError`."""
    prefix, files, _, _ = socket.recv_fds(sock, 4, 1)
    with ExitStack() as unused:
        for file in files:
            unused.callback(os.close, file)
        size = int.from_bytes(prefix + _exactly(sock, 4 - len(prefix)), "big")
        if size > HELLO_BYTES:
            raise PeerLost("expected a greeting")
        try:
            found = msgspec.msgpack.decode(_exactly(sock, size), type=Hello)
        except msgspec.DecodeError as error:
            raise PeerLost("expected a greeting") from error
        unused.pop_all()
    return found, files


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := sock.recv(size - len(data))):
            raise PeerLost("the other end has closed the socket")
        data += more
    return data
