"""The body of errors."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from coserve.core.types import Wire


class ErrorInfo(Wire, frozen=True):
    """`field` names what of the request is wrong; `line` the row of a corpus."""

    code: str
    message: str
    field: str | None = None
    line: int | UnsetType = UNSET


class ErrorBody(Wire, frozen=True):
    """The body of every response that is not 2xx."""

    error: ErrorInfo
