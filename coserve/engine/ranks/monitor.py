"""This rank's reports to the daemon."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import msgspec

from coserve.core.ranks import HEARTBEAT, RankReady, RankReport
from coserve.engine.ranks.channel import frame
from coserve.engine.ranks.progress import Progress


class Monitor:
    """Sends heartbeats from its own thread until the process ends."""

    def __init__(self, sock: socket.socket) -> None:
        self.progress = Progress()
        self._socket, self._encoder, self._lock = sock, msgspec.msgpack.Encoder(), threading.Lock()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def report(self, report: RankReport) -> None:
        """Send a report; on any thread. Ignored if the daemon is gone, because this process then ends too."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(frame(self._encoder, report))

    def ready(self, device: str) -> None:
        """Report that the rank has started; `device`: cpu or cuda."""
        self.progress.ready(device)
        self.report(RankReady())

    def _beat(self) -> None:
        while True:
            self.report(self.progress.heartbeat())
            time.sleep(HEARTBEAT)
