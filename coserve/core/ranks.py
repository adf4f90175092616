"""Messages between the daemon and the processes of an engine under tensor parallelism, one process per rank.

Rank 0 runs the engine and has the link to the API process; the others follow it (`engine.ranks`). Each rank reports to
the daemon that it is alive and how far it is.
"""

from __future__ import annotations

import msgspec

HEARTBEAT = 0.5
"""Seconds between two heartbeats of a rank."""
SILENCE = 6.0
"""Seconds without a heartbeat after which a ready rank is lost."""
START_SILENCE = 120.0
"""Seconds without a heartbeat after which a starting rank is lost: imports may block all of its threads."""
HANG = 8.0
"""Seconds of `Heartbeat.late` after which a command hangs, for example in a collective, although heartbeats arrive."""
FIRST = {"cuda": 1.0, "cpu": 300.0}
"""Timeout in seconds of the first command of a kind, loading and compiling of code excluded; by device."""
LOADING = 2.0
"""Seconds after a rank last loaded or compiled code during which other ranks may wait for it."""
LEAST = {"cuda": 0.0, "cpu": 50.0}
"""Floor in seconds of the timeout learned for a kind of command, by device. On a CPU one GEMM of a large base is
slow."""
START = 600.0
"""Timeout in seconds of a starting rank's command: layers are loaded, or compiled if the warm-up could not do so."""
JOIN_SECONDS = 1800.0
"""Seconds that starting ranks wait for each other; later, the timeout of a CPU collective."""


BOARD_WORDS = 1 << 14
"""Words of 8 bytes per rank in the board."""


def board_bytes(ranks: int) -> int:
    """Return the size of the board: a file, zeros at first, that all ranks map (`parallel.lockstep`)."""
    return 8 * BOARD_WORDS * ranks


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A process's tensor-parallel rank and its inherited file descriptors."""

    rank: int
    size: int
    rendezvous: str
    """`file://PATH` through which the ranks find each other (`parallel.mesh.join`)."""
    board: int
    """File descriptor of the board, see `board_bytes`."""
    monitor: int
    """Socket to the daemon, for `RankReport`."""
    commands: tuple[int, ...]
    """Sockets for rank 0's commands: on rank 0 one to each other rank, elsewhere one to rank 0."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent every `HEARTBEAT` seconds from a dedicated thread."""

    done: int
    """Commands of rank 0 that this rank has finished."""
    begun: int
    """Collectives that this rank has begun."""
    late: float
    """Seconds without progress of the current command, beyond its timeout; 0: on time, or no command."""
    loads: bool = False
    """The rank has compiled or loaded code since the last heartbeat. That counts as progress, and other ranks may wait
    for it."""


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The rank has started. From now on it must report on time."""


class RankRefused(msgspec.Struct, frozen=True, tag=True):
    """The rank cannot start with these settings; `code` is that of a `StartupError`."""

    code: str
    message: str


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank ends, and the engine with it. `message` is safe to show."""

    message: str


RankReport = Heartbeat | RankReady | RankRefused | RankFailed
