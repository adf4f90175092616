"""Responses: structs as JSON, and errors as `{"error": {"code", "message", "field"}}`."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web
from msgspec import UNSET

from coserve.api.http.json_blocks import encode_json
from coserve.core.errors import CapacityError, CorpusError, CoserveError, InternalError, QueueFull
from coserve.core.schemas.service import ErrorBody, ErrorInfo

JSON = "application/json"
CHUNK = 256 << 10
"""Bytes that are written to a connection at once."""


def json_response(body: msgspec.Struct | Sequence[msgspec.Struct], *, status: int = 200) -> web.Response:
    parts = encode_json(body)
    if sum(map(len, parts)) <= CHUNK:
        return encoded_json(b"".join(parts), status=status)
    return web.Response(status=status, body=_chunks(parts), content_type=JSON)


def encoded_json(content: bytes, *, status: int = 200) -> web.Response:
    """Return a response of encoded JSON. Large content is sent in chunks."""
    body = content if len(content) <= CHUNK else io.BytesIO(content)
    return web.Response(status=status, body=body, content_type=JSON)


async def _chunks(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield `parts` in chunks, yielding to the event loop between them."""
    chunk = bytearray()
    for part in parts:
        for first in range(0, len(part), CHUNK):
            chunk += part[first : first + CHUNK]
            if len(chunk) >= CHUNK:
                yield bytes(chunk)
                chunk.clear()
                await asyncio.sleep(0)
    if chunk:
        yield bytes(chunk)


def error_info(error: CoserveError) -> ErrorInfo:
    """Return what a client may see of an error. Internal faults show nothing: their text could name paths or
    addresses."""
    if error.status == 500 and not isinstance(error, CapacityError):
        return ErrorInfo(code=InternalError.code, message="internal error")
    line = error.line if isinstance(error, CorpusError) else None
    return ErrorInfo(code=error.code, message=error.message, field=error.field, line=UNSET if line is None else line)


@dataclass(frozen=True)
class ErrorFormat:
    """A dialect's error bodies: their type, and the function that makes one. `bad_request`: the status that replaces
    400."""

    body: type[msgspec.Struct]
    make: Callable[[CoserveError], msgspec.Struct]
    bad_request: int = 400


NATIVE_ERRORS = ErrorFormat(ErrorBody, lambda error: ErrorBody(error=error_info(error)))


def error_response(error: CoserveError, error_format: ErrorFormat = NATIVE_ERRORS) -> web.Response:
    """Return the response for an error, with `Retry-After` where waiting helps."""
    status = error_format.bad_request if error.status == 400 else error.status
    response = json_response(error_format.make(error), status=status)
    if isinstance(error, QueueFull):
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, CapacityError) and error.status == 503:
        response.headers["Retry-After"] = "2"
    return response
