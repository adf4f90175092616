"""Schema of error bodies."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from coserve.core.types import Wire


class ErrorInfo(Wire, frozen=True):
    """An error. `field` names the wrong field of the request; `line` is the wrong row of a corpus."""

    code: str
    message: str
    field: str | None = None
    line: int | UnsetType = UNSET


class ErrorBody(Wire, frozen=True):
    """The body of every response that is not 2xx."""

    error: ErrorInfo
