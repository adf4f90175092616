"""Parses what servers with OpenAI's API send: chunks of a completion, lists of models, and errors in their several
forms."""

from __future__ import annotations

import re
from typing import Annotated

import aiohttp
import msgspec

from coserve.client.sse import Event
from coserve.core.errors import (
    BY_CODE,
    AdapterNotFound,
    CoserveError,
    EngineUnavailable,
    InternalError,
    InvalidRequest,
    QueueFull,
    Unauthorized,
    error_from_code,
)
from coserve.workloads.formats.lines import JSON_ERRORS, MAX_TOKENS

_ERRORS: dict[int, type[CoserveError]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: AdapterNotFound,
    429: QueueFull,
    503: EngineUnavailable,
}
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class Counts(msgspec.Struct):
    """Token counts of a request, so far or at its end."""

    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0


class Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Counts | None = None
    error: object = None
    kind: str = msgspec.field(default="", name="object")


class _Error(msgspec.Struct):
    """An error's code and message. The code may be a name, a status or missing."""

    code: str | int | None = None
    message: str | None = None


class _ErrorBody(_Error):
    """An error body, as OpenAI, coserve and vLLM send it. Older versions of vLLM put code and message next to
    `"object": "error"`."""

    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_CHUNK = msgspec.json.Decoder(Chunk)


def read_chunk(event: Event) -> Chunk:
    """Parse a chunk. Raises the error that came in its place, `InternalError` for anything else."""
    if event.event == "error":
        raise _stream_error(event.data)
    try:
        chunk = _CHUNK.decode(event.data)
    except JSON_ERRORS as error:
        raise _no_chunk(event.data) from error
    if chunk.error is not None or chunk.kind == "error":
        raise _stream_error(event.data)
    if chunk.choices is None and chunk.usage is None:
        raise _no_chunk(event.data)
    return chunk


def read_models(content: bytes) -> list[str]:
    """Return the names in a list of models. Raises one of `JSON_ERRORS`."""
    return [model.id for model in msgspec.json.decode(content, type=_Models).data]


async def check(response: aiohttp.ClientResponse) -> None:
    """Raise for a failed response: the error that the body's code names if its status matches, else the status's
    error."""
    if response.status < 300:
        return
    content = await response.read()
    found = _error_in(content)
    text = re.sub(r"\s+", " ", found.message or content[:200].decode(errors="replace"))
    message = f"status {response.status}: {text}"
    named = BY_CODE.get(str(found.code))
    if named is not None and named.status == response.status:
        raise error_from_code(named.code, message)
    kind = _ERRORS.get(response.status, InvalidRequest if response.status < 500 else InternalError)
    raise kind(message)


def _no_chunk(data: str) -> InternalError:
    return InternalError(f"expected a chunk of a completion, got {data[:200]}")


def _stream_error(data: str) -> CoserveError:
    """Return the error at the end of a stream: the one that its code names, else `InternalError`."""
    found = _error_in(data.encode())
    if str(found.code) in BY_CODE:
        return error_from_code(str(found.code), found.message or "the stream ended with an error")
    return InternalError(f"the stream ended with an error: {found.message or data[:200]}")


def _error_in(content: bytes) -> _Error:
    """Return the error in a body; without code and message if the body has another form."""
    try:
        body = msgspec.json.decode(content, type=_ErrorBody)
    except JSON_ERRORS:
        return _Error()
    return body.error or body
