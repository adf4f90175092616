"""Engines that died while a job ran."""

from __future__ import annotations

from dataclasses import dataclass

from coserve.core.errors import EngineCrashed
from coserve.core.schemas import ErrorInfo

MAX_DEATHS = 3
"""A job is paused after this many engines in a row died while it ran, if it got no further in between."""
ENGINE_CRASHED = ErrorInfo(
    code=EngineCrashed.code,
    message=f"the engine died {MAX_DEATHS} times while this job trained, and no step was new in between; "
    "resume it to try again",
)
"""Why the job is paused."""


@dataclass(frozen=True)
class Deaths:
    """`count` in a row, since the job first got to `step`, the furthest that it got to."""

    count: int = 0
    step: int = -1

    def one_more(self, step: int) -> Deaths:
        """The engine died again, and the job was at `step`."""
        return Deaths(1, step) if step > self.step else Deaths(self.count + 1, self.step)
