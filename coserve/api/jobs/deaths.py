"""Counts engines that died while a job ran."""

from __future__ import annotations

from dataclasses import dataclass

from coserve.core.errors import EngineCrashed
from coserve.core.schemas.service import ErrorInfo

MAX_DEATHS = 3
"""A job is paused after this many engines in a row died while it ran, if it made no progress in between."""
ENGINE_CRASHED = ErrorInfo(
    code=EngineCrashed.code,
    message=f"the engine died {MAX_DEATHS} times while this job trained, and no step was new in between; "
    "resume it to try again",
)
"""Error of a job that is paused for this reason."""


@dataclass(frozen=True)
class Deaths:
    """Number of engine deaths in a row, `count`, since the job first reached `step`, its furthest step."""

    count: int = 0
    step: int = -1

    def one_more(self, step: int) -> Deaths:
        """Return the deaths after one more, with the job at `step`."""
        return Deaths(1, step) if step > self.step else Deaths(self.count + 1, self.step)
