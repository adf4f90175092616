"""LoRA servers that run by themselves (`coserve lora-server`), as an engine uses them beside others."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import struct
import threading
from contextlib import ExitStack, closing
from pathlib import Path

from coserve.core.errors import LoraServersDiffer, LoraServersSilent
from coserve.core.link.link import PeerLost
from coserve.core.link.lora_servers import Hello, receive_hello, send_hello, socket_path
from coserve.core.ranks import START_SILENCE
from coserve.engine.lora_server.messages import StartServer
from coserve.engine.lora_server.running import Server

log = logging.getLogger(__name__)

CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid and gid."""


def connect_to_server(folder: Path, settings: StartServer, silence: float = START_SILENCE) -> Server:
    """Connect to a server of a folder that `coserve lora-server` has. Raises `ConnectionError` if it does not run,
    `LoraServersDiffer` if it is of another version, and `LoraServersSilent` if it has not said so within `silence`
    seconds."""
    path, mailbox = socket_path(folder, settings.index), settings.mailbox
    with ExitStack() as opened:
        sock = opened.enter_context(socket.socket(socket.AF_UNIX))
        sock.settimeout(silence)
        try:
            sock.connect(str(path))
            process = opened.enter_context(closing(SharedProcess(sock, 2 * settings.deadline)))
            send_hello(sock, () if mailbox is None else [mailbox.page])
            _check_version(sock, process, path)
            server = Server.begin(process, sock, settings)
        except OSError as error:
            raise ConnectionError(f"no LoRA server listens at {path} (coserve lora-server): {error}") from error
        opened.pop_all()
    return server


def _check_version(sock: socket.socket, process: SharedProcess, path: Path) -> None:
    """Receive the server's greeting, or end it if it hangs. Raises `LoraServersDiffer` and `LoraServersSilent`."""
    try:
        found = str(receive_hello(sock)[0])
    except TimeoutError as error:
        process.kill()
        process.wait()
        silence = sock.gettimeout()
        raise LoraServersSilent(f"LoRA server at {path}: said nothing for {silence:g} s, and was ended") from error
    except (PeerLost, ConnectionResetError):
        found = "one that says no version and closes the connection: it is older, or has just ended"
    if found != str(Hello()):
        raise LoraServersDiffer(f"LoRA server at {path}: expected {Hello()} (this daemon's), got {found}")


class SharedProcess:
    """Implements `ServerProcess` for a server that other engines use, too: it ends the connection, and the process only
    if the server does not end it as well, as it could still write into the engine's memory."""

    def __init__(self, sock: socket.socket, patience: float) -> None:
        """`sock`: the connection; `patience`: seconds that the server may take. Raises `ConnectionError` if its process
        cannot be known."""
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        (self._pid, user, _), self._patience = CREDENTIALS.unpack(found), patience
        if self._pid <= 0 or user != os.getuid():
            raise ConnectionError("expected a server of this user, in this container")
        self._end, self._waiting = sock.dup(), threading.Lock()

    def close(self) -> None:
        """End the connection without waiting."""
        with self._waiting:
            self._end.close()

    def kill(self) -> None:
        try:
            self._end.shutdown(socket.SHUT_WR)
        except OSError:  # the connection has ended
            return

    def wait(self) -> int:
        """Wait until the server has closed the connection."""
        with self._waiting:
            if self._end.fileno() < 0:
                return 0
            ended = select.poll()
            ended.register(self._end, select.POLLRDHUP)
            if not ended.poll(1000 * self._patience):
                log.warning("a LoRA server that other engines use, too, does not answer: it is killed")
                os.kill(self._pid, signal.SIGKILL)  # it has the connection open, so the pid is its own
                ended.poll()
            self._end.close()
        return 0
