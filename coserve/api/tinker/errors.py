"""Errors in Tinker's format."""

from __future__ import annotations

from coserve.api.http.responses import ErrorFormat, error_info
from coserve.api.tinker.schemas import TinkerError
from coserve.core.errors import CoserveError


def tinker_error(error: CoserveError) -> TinkerError:
    """Return the error in Tinker's format: a text that names the field, and the category, `user` or `server`."""
    info = error_info(error)
    message = info.message if info.field is None or info.field in info.message else f"{info.field}: {info.message}"
    return TinkerError(message, "user" if error.status < 500 else "server")


TINKER_ERRORS = ErrorFormat(TinkerError, tinker_error, bad_request=422)
"""The SDK sends a request again that had status 400, as if a proxy had refused it."""
