"""Decides from the ranks' reports when a rank is lost. No IO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coserve.core.ranks import HANG, HEARTBEAT, LOADING, SILENCE, START_SILENCE, Heartbeat


@dataclass(eq=False)
class WatchedRank:
    """State of a rank. `look` is called every `HEARTBEAT` seconds."""

    number: int
    ready: bool = False
    done: int = 0
    """Commands that the rank has finished, by its last heartbeat."""
    begun: int = 0
    """Collectives that the rank has begun, by its last heartbeat."""
    late: float = 0.0
    """See `Heartbeat`."""
    without_loads: int = 1 << 30
    """Heartbeats since the rank last loaded or compiled code."""
    stopped: bool = False
    """Whether its process is stopped, as after SIGSTOP. A starting rank may be silent for long, but not while
    stopped."""
    looks: int = 0
    """Looks since the rank's last report. Looks are counted instead of seconds, since silence while the daemon itself
    was stopped does not count."""

    @property
    def silent(self) -> float:
        """Seconds since the rank's last report."""
        return self.looks * HEARTBEAT

    @property
    def loads(self) -> bool:
        """Whether the others may wait for this rank because it loads or compiles code."""
        return self.without_loads * HEARTBEAT < LOADING

    def received(self, heartbeat: Heartbeat) -> None:
        self.done, self.begun, self.late = heartbeat.done, heartbeat.begun, heartbeat.late
        self.without_loads = 0 if heartbeat.loads else self.without_loads + 1

    def look(self) -> None:
        self.looks += 1


def find_loss(ranks: Sequence[WatchedRank]) -> tuple[WatchedRank, str] | None:
    """Return the rank that is lost, and how; None: all live.

    A rank is lost if its heartbeats stop, but not merely for being behind the others. If a command hangs, all ranks may
    wait for the one that does not take part in a collective: it has begun fewer collectives than the others, or is
    furthest behind. If none is (as in a step that is a CUDA graph), the culprit is unknown. A rank that loads or
    compiles code may keep the others waiting, so no rank counts as hung meanwhile.
    """
    for rank in ranks:
        limit = SILENCE if rank.ready or rank.stopped else START_SILENCE
        if rank.silent > limit:
            return rank, f"did not answer for {limit:.0f} s"
    if any(rank.late > HANG for rank in ranks) and not any(rank.loads for rank in ranks):
        behind = min(ranks, key=_progress)
        others = ", nor did the others" if all(_progress(rank) == _progress(behind) for rank in ranks) else ""
        return behind, f"made no progress for {HANG:.0f} s longer than expected{others}"
    return None


def _progress(rank: WatchedRank) -> tuple[int, int]:
    return rank.begun, rank.done
