"""Interface of a tracker's library, which stores the curve of one job; used in a helper process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from coserve.api.tracking.points import Point, Run, Text
from coserve.core.training.jobs import JobState


class Sink(Protocol):
    """One job's run in a tracker. Every method may raise whatever the library raises; the sink is then reopened."""

    def write(self, points: Sequence[Point], texts: Sequence[Text]) -> None:
        """Add steps, ascending, and samples of these or earlier steps; the library has them when this returns. A sink
        may omit samples, and may store those of a killed process twice."""
        ...

    def end(self, state: JobState) -> None:
        """Mark the run as ended: the job has ended."""
        ...

    def close(self) -> None:
        """Close the run before the process ends; the job may continue in another process."""
        ...


OpenSink = Callable[[Path, Run, int], Sink]
"""`(folder, run, step)`: open a run or continue it. Points from `step` on follow. Points that the run already has are
replaced or kept, never stored twice. `folder` is the tracker's own and exists."""
