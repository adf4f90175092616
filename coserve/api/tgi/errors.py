"""Errors in TGI's format."""

from __future__ import annotations

from aiohttp import web

from coserve.api.http.responses import ErrorFormat, error_info, error_response
from coserve.api.tgi.schemas import TgiError, TgiErrorType
from coserve.errors import CoserveError, QueueFull

_FIELDS = {"prompt": "inputs", "adapter": "adapter_id", "max_tokens": "max_new_tokens"}
"""TGI's names of our fields."""


def tgi_error(error: CoserveError) -> TgiError:
    """A text, which names the field, and one of TGI's kinds."""
    kind: TgiErrorType = "validation" if error.status < 500 else "generation"
    if isinstance(error, QueueFull):
        kind = "overloaded"
    info = error_info(error)
    field = None if info.field is None else _FIELDS.get(info.field, info.field.removeprefix("parameters."))
    message = info.message if field is None or field in info.message else f"{field}: {info.message}"
    return TgiError(error=message, error_type=kind)


TGI_ERRORS = ErrorFormat(TgiError, tgi_error)


def tgi_error_response(error: CoserveError) -> web.Response:
    response = error_response(error, TGI_ERRORS)
    if error.status == 400:
        response.set_status(422)  # what TGI's clients know as a validation error
    return response
