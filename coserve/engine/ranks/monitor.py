"""This rank's reports to the daemon."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from coserve.engine.ranks.channel import frame
from coserve.ranks import HEARTBEAT, Heartbeat, RankReport


class Monitor:
    """Sends heartbeats from a thread of its own until the process ends. `done` may be set later."""

    def __init__(self, sock: socket.socket) -> None:
        self.done: Callable[[], int] = lambda: 0
        """Commands of rank 0 that this rank has finished. Called on the monitor's thread."""
        self._socket, self._encoder, self._lock = sock, msgspec.msgpack.Encoder(), threading.Lock()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def report(self, report: RankReport) -> None:
        """On any thread. Nothing happens if the daemon is gone: this process ends with it."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(frame(self._encoder, report))

    def _beat(self) -> None:
        while True:
            self.report(Heartbeat(self.done()))
            time.sleep(HEARTBEAT)
