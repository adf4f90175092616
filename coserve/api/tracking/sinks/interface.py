"""Where the curve of one job goes: a tracker's library, in a helper process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from coserve.api.tracking.points import Point, Run, Text
from coserve.core.types import JobState


class Sink(Protocol):
    """The run of one job. Every method may raise whatever the library raises; the sink is then opened again."""

    def write(self, points: Sequence[Point], texts: Sequence[Text]) -> None:
        """Add steps, ascending, and samples of these or earlier steps. A sink may leave samples out, and doubles those
        of a process that was killed. The library has taken them when this returns."""
        ...

    def end(self, state: JobState) -> None:
        """The job is over."""
        ...

    def close(self) -> None:
        """The process ends; the job may go on in another one."""
        ...


OpenSink = Callable[[Path, Run, int], Sink]
"""`(folder, run, step)`: open a run or go on with it. Points from `step` on follow; what the run has of them is
replaced or kept, but never doubled. `folder` is the tracker's own and exists."""
