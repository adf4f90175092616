"""Turns the daemon's error bodies into the errors of `coserve.core.errors`."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from coserve.client.transport import Response
from coserve.core import errors
from coserve.core.schemas.service import ErrorBody, ErrorInfo
from coserve.core.validation import decode_json

_BY_STATUS: dict[int, type[errors.CoserveError]] = {
    401: errors.Unauthorized,
    404: errors.NotFound,
    413: errors.BodyTooLarge,
    429: errors.QueueFull,
    503: errors.EngineUnavailable,
}


def job_error(info: ErrorInfo) -> errors.CoserveError:
    """Return the error that made a job fail."""
    return _made(errors.BY_CODE.get(info.code, errors.JobError), info)


async def response_error(response: Response) -> errors.CoserveError:
    """Return the error of a response with status 300 or more.

    An unknown code (of a newer daemon) and a body of another form (of a proxy) become the error of their status.
    """
    body = await response.read()
    try:
        info = decode_json(body, ErrorBody).error
    except msgspec.DecodeError:
        info = ErrorInfo(code="", message=f"the response has status {response.status} and no error that coserve wrote")
    generic = errors.RequestError if response.status < 500 else errors.InternalError
    error = _made(errors.BY_CODE.get(info.code, _BY_STATUS.get(response.status, generic)), info)
    seconds = response.headers.get("retry-after", "")
    if isinstance(error, errors.CapacityError) and seconds.isascii() and seconds.isdigit():
        error.retry_after = float(seconds)
    return error


def event_error(data: str) -> errors.CoserveError:
    """Return the error of a stream that failed after its first byte."""
    try:
        info = decode_json(data, ErrorBody).error
    except msgspec.DecodeError:
        return errors.InternalError(f"the stream failed, and not with an error that coserve wrote: {data[:200]!r}")
    return _made(errors.BY_CODE.get(info.code, errors.InternalError), info)


def _made(kind: type[errors.CoserveError], info: ErrorInfo) -> errors.CoserveError:
    error = kind(info.message)  # the message already has the line
    error.field = info.field
    if isinstance(error, errors.CorpusError) and info.line is not UNSET:
        error.line = info.line
    return error
