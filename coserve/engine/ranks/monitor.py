"""This rank's reports to the daemon."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import msgspec

from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.ranks import HEARTBEAT, RankReady, RankReport
from coserve.engine.ranks.progress import Progress


class Monitor:
    """Sends heartbeats from its own thread until the process ends."""

    def __init__(self, sock: socket.socket) -> None:
        self.progress = Progress()
        self._reports = Channel[RankReport, None](sock, msgspec.msgpack.Decoder(None))
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def report(self, report: RankReport) -> None:
        """Send a report; on any thread. Ignored if the daemon is gone, because this process then ends too."""
        with contextlib.suppress(PeerLost):
            self._reports.send(report)

    def ready(self, device: str) -> None:
        """Report that the rank has started; `device`: cpu or cuda."""
        self.progress.ready(device)
        self.report(RankReady())

    def _beat(self) -> None:
        while True:
            self.report(self.progress.heartbeat())
            time.sleep(HEARTBEAT)
