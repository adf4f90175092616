"""The first words of an engine and a LoRA server that several engines use: their versions, and open files.

They are read from the socket itself: a `Channel` would take the bytes after them into its buffer, and drop the files.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from coserve.core.link.channel import frame
from coserve.core.link.link import PeerLost
from coserve.core.link.lora_servers import Hello

MAX_BYTES = 1 << 12
"""Most bytes of a greeting."""
MAX_FILES = 1
_decoder = msgspec.msgpack.Decoder(Hello)


def send_hello(sock: socket.socket, files: Sequence[int] = ()) -> None:
    """Send this process's greeting, and file descriptors. Raises `OSError`."""
    socket.send_fds(sock, [frame(msgspec.msgpack.Encoder(), Hello())], files)


def receive_hello(sock: socket.socket) -> tuple[Hello, list[int]]:
    """Return the other end's greeting, and the file descriptors that came with it, which the caller closes. Raises
    `PeerLost` if the other end closes the socket, or sends anything else, and `OSError`."""
    prefix, files, _, _ = socket.recv_fds(sock, 4, MAX_FILES)
    with ExitStack() as unused:
        for file in files:
            unused.callback(os.close, file)
        size = int.from_bytes(prefix + _exactly(sock, 4 - len(prefix)), "big")
        if size > MAX_BYTES:
            raise PeerLost("expected a greeting")
        try:
            found = _decoder.decode(_exactly(sock, size))
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
