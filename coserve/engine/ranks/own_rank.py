"""What a process knows of its rank, from the start on. Imports no torch."""

from __future__ import annotations

import os
import socket

from coserve.core.ranks import RankPlace, place_from_json
from coserve.engine.ranks.monitor import Monitor


class OwnRank:
    """This process's rank: heartbeats begin at once."""

    def __init__(self, place: RankPlace) -> None:
        self.place, self.monitor = place, Monitor(socket.socket(fileno=place.monitor))
        self.commands = [socket.socket(fileno=fd) for fd in place.commands]
        """One for each follower, or the one to rank 0."""
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # ranks are of one host: nothing listens elsewhere
            os.environ[name] = "lo"


def own_rank(arguments: list[str]) -> OwnRank | None:
    """The rank in a process's arguments, after the file descriptor of its first socket; None: the engine is this
    process alone."""
    return OwnRank(place_from_json(arguments[1])) if len(arguments) > 1 else None
