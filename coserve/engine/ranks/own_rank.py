"""This process's rank and its sockets, available before torch is imported."""

from __future__ import annotations

import os
import socket

from coserve.core.ranks import RankPlace, place_from_json
from coserve.engine.ranks.monitor import Monitor


class OwnRank:
    """This process's rank. Heartbeats begin at construction."""

    def __init__(self, place: RankPlace) -> None:
        self.place, self.monitor = place, Monitor(socket.socket(fileno=place.monitor))
        self.commands = [socket.socket(fileno=fd) for fd in place.commands]
        """On rank 0 one socket for each follower; on a follower the one to rank 0."""
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # all ranks are on one host: listen only there
            os.environ[name] = "lo"


def own_rank(arguments: list[str]) -> OwnRank | None:
    """Parse the rank from a process's arguments, after its first socket's file descriptor; None without tensor
    parallelism."""
    return OwnRank(place_from_json(arguments[1])) if len(arguments) > 1 else None
