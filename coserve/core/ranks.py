"""What the daemon and the processes of one engine under tensor parallelism tell each other: one process a rank.

Rank 0 runs the engine and has the link to the API process; the others follow it (`engine.ranks`). Each tells the daemon
that it is alive, and how far it is.
"""

from __future__ import annotations

import msgspec

HEARTBEAT = 0.5
"""Seconds between two heartbeats of a rank."""
SILENCE = 6.0
"""Seconds without a heartbeat after which a rank that was ready is lost."""
START_SILENCE = 120.0
"""The same for a rank that starts: imports may keep all of its threads from running."""
HANG = 8.0
"""Seconds that a command may be late (`Heartbeat.late`): then it hangs, in a collective for one, though heartbeats
come."""
FIRST = {"cuda": 1.0, "cpu": 300.0}
"""Seconds that the first command of a kind is expected to pause at most while it does not load or compile code. By
device."""
LOADING = 2.0
"""Seconds since a rank last loaded or compiled code in which the others may wait for it."""
LEAST = {"cuda": 0.0, "cpu": 50.0}
"""Seconds that a later command of a kind may always pause, however short earlier ones were: on a CPU one matrix product
of a large base takes long. By device."""
START = 600.0
"""Seconds that a command of a rank that starts may pause: layers are loaded, or compiled where the warm-up could not do
so."""
JOIN_SECONDS = 1800.0
"""Seconds that ranks wait for each other when they start; later, the limit of a collective on CPU."""


BOARD_WORDS = 1 << 14
"""Words of 8 bytes of each rank's part of the board."""


def board_bytes(ranks: int) -> int:
    """Size of the board: a file that all ranks map, of zeros at first (`parallel.lockstep`)."""
    return 8 * BOARD_WORDS * ranks


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank a process is, and its inherited file descriptors."""

    rank: int
    size: int
    rendezvous: str
    """`file://PATH`: where the ranks find each other (`parallel.mesh.join`)."""
    board: int
    """See `board_bytes`."""
    monitor: int
    """Socket to the daemon, for `RankReport`."""
    commands: tuple[int, ...]
    """Sockets for the commands of rank 0: to each of the others, or to rank 0."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent every `HEARTBEAT` seconds, from a thread of its own."""

    done: int
    """Commands of rank 0 that this rank has finished."""
    begun: int
    """Collectives that it has begun."""
    late: float
    """Seconds for which the command that it executes has made no progress, beyond those that it is expected to pause;
    0: not late, or in none."""
    loads: bool = False
    """It has compiled or loaded code since the last heartbeat, which is progress, and the other ranks may wait for
    it."""


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The rank has started; it is expected to answer from now on."""


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
