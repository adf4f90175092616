"""Messages that the profile's process sends, one JSON object a line."""

from __future__ import annotations

from coserve.core.types import Wire
from coserve.engine.profile_request.report import ProfileReport


class Step(Wire, frozen=True, tag="step"):
    """One of `total` sizes begins."""

    done: int
    total: int
    text: str


class Finished(Wire, frozen=True, tag="finished"):
    report: ProfileReport


class Failed(Wire, frozen=True, tag="failed"):
    """The profile failed. `code`: of the error's class."""

    code: str
    message: str


Message = Step | Finished | Failed
