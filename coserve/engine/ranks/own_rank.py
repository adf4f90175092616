"""This process's rank, its sockets, and its reports to the daemon; available before torch is imported."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import msgspec

from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.ranks import HEARTBEAT, RankPlace, RankReady, RankReport
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


class OwnRank:
    """This process's rank. Heartbeats begin at construction."""

    def __init__(self, place: RankPlace) -> None:
        self.place, self.monitor = place, Monitor(socket.socket(fileno=place.monitor))
        self.commands = [socket.socket(fileno=fd) for fd in place.commands]
        """On rank 0, one socket for each follower; on a follower, a single one, to rank 0."""
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # all ranks are on one host: listen only there
            os.environ[name] = "lo"


def own_rank(arguments: list[str]) -> OwnRank | None:
    """Parse the rank from a process's arguments, after its first socket's file descriptor; None without tensor
    parallelism."""
    return OwnRank(msgspec.json.decode(arguments[1], type=RankPlace)) if len(arguments) > 1 else None
