"""Errors in TGI's format."""

from __future__ import annotations

from coserve.api.http.responses import ErrorFormat, error_info
from coserve.api.tgi.schemas import TgiError, TgiErrorType
from coserve.core.errors import CoserveError, QueueFull

_FIELDS = {
    "prompt": "inputs",
    "adapter": "adapter_id",
    "max_tokens": "max_new_tokens",
    "structured_outputs.json": "grammar or response_format",
    "structured_outputs.regex": "grammar",
}
"""TGI's names for our fields."""


def tgi_error(error: CoserveError) -> TgiError:
    """Return the error as TGI's: a text that names the field, and one of TGI's error types."""
    kind: TgiErrorType = "validation" if error.status < 500 else "generation"
    if isinstance(error, QueueFull):
        kind = "overloaded"
    info = error_info(error)
    field = None if info.field is None else _FIELDS.get(info.field, info.field.removeprefix("parameters."))
    message = info.message if field is None or field in info.message else f"{field}: {info.message}"
    return TgiError(error=message, error_type=kind)


TGI_ERRORS = ErrorFormat(TgiError, tgi_error, bad_request=422)
"""TGI's clients know 422 as a validation error."""
