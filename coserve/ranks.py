"""What the daemon and the processes of one engine under tensor parallelism tell each other: one process a rank.

Rank 0 runs the engine and has the link to the API process; the others follow it (`engine.ranks`). Each tells the daemon that it
is alive, and how far it is.
"""

from __future__ import annotations

import msgspec

HEARTBEAT = 0.5
"""Seconds between two heartbeats of a rank."""
SILENCE = 6.0
"""Seconds without a heartbeat, or without progress behind rank 0, after which a rank that was ready is given up."""
START_SILENCE = 120.0
"""The same for a rank that starts: imports may keep all of its threads from running."""
STALL = {"cuda": 30.0, "cpu": 300.0}
"""Seconds in one command after which a rank that was ready is given up, though it is alive: it may wait for a collective that never
ends. The first steps and slices may load kernels, which takes longer than any step; on a CPU a step of a large base takes minutes."""
START_STALL = 1800.0
"""The same for a rank that starts: all layers are compiled in one command."""
JOIN_SECONDS = 1800.0
"""Seconds that ranks wait for each other when they start; later, the limit of a collective on CPU."""


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank a process is, and its inherited file descriptors."""

    rank: int
    size: int
    rendezvous: str
    """`file://PATH`: where the ranks find each other (`parallel.mesh.join`)."""
    monitor: int
    """Socket to the daemon, for `RankReport`."""
    commands: tuple[int, ...]
    """Sockets for the commands of rank 0: to each of the others, or to rank 0."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent every `HEARTBEAT` seconds, from a thread of its own."""

    done: int
    """Commands of rank 0 that this rank has finished."""
    busy: float
    """Seconds that it has spent in the command that it executes; 0: in none."""


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The rank has loaded the base; it is expected to answer from now on."""

    device: str
    """cpu or cuda."""


class RankRefused(msgspec.Struct, frozen=True, tag=True):
    """The rank cannot start with these settings; `code` is that of a `StartupError`."""

    code: str
    message: str


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank ends, and with it the engine. `message` is safe to show."""

    message: str


RankReport = Heartbeat | RankReady | RankRefused | RankFailed


def place_to_json(place: RankPlace) -> str:
    return msgspec.json.encode(place).decode()


def place_from_json(text: str) -> RankPlace:
    return msgspec.json.decode(text, type=RankPlace)
