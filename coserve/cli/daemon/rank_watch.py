"""When a rank counts as lost, from what it reports. No IO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coserve.core.ranks import HANG, HEARTBEAT, LOADING, SILENCE, START_SILENCE, Heartbeat


@dataclass(eq=False)
class WatchedRank:
    """What is known of a rank. `look` is called every `HEARTBEAT` seconds."""

    number: int
    ready: bool = False
    done: int = 0
    """Commands that it has finished, by its last heartbeat."""
    begun: int = 0
    """Collectives that it has begun, by its last heartbeat."""
    late: float = 0.0
    """See `Heartbeat`."""
    without_loads: int = 1 << 30
    """Heartbeats since it last loaded or compiled code."""
    stopped: bool = False
    """Its process does not run, as after SIGSTOP: a rank that starts may be silent for long only while it does."""
    looks: int = 0
    """Since its last report. Looks are counted and not seconds: while the daemon was stopped itself, no rank was
    silent."""

    @property
    def silent(self) -> float:
        """Seconds since its last report."""
        return self.looks * HEARTBEAT

    @property
    def loads(self) -> bool:
        """Whether the others may wait for it, as it loads or compiles code."""
        return self.without_loads * HEARTBEAT < LOADING

    def received(self, heartbeat: Heartbeat) -> None:
        self.done, self.begun, self.late = heartbeat.done, heartbeat.begun, heartbeat.late
        self.without_loads = 0 if heartbeat.loads else self.without_loads + 1

    def look(self) -> None:
        self.looks += 1


def find_loss(ranks: Sequence[WatchedRank]) -> tuple[WatchedRank, str] | None:
    """The rank that is lost, and how; None: all live.

    A rank is lost if its heartbeats stop, however far behind the others it is while they come. If a command hangs, all
    ranks may wait for the one that does not take part in a collective: it has begun fewer than the others, or is
    furthest behind; where none is, as in a step that is a CUDA graph, it is not known which. While
    a rank loads or compiles code, the others may wait for that.
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
