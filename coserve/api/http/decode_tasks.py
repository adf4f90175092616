"""Helper tasks that decode large JSON bodies. The size of their results is limited, so that receiving one does not
block the API process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from coserve.api.http.parsing import decode_dialect, decode_json
from coserve.core.errors import CoserveError, InvalidRequest
from coserve.core.schemas.jobs import FinetuneRequest
from coserve.data.offload.protocol import Failure, TaskContext, error_of, failure_of, find, name_of
from coserve.state.durable import disk_errors

T = TypeVar("T")

MAX_VALUES = 1 << 18
"""Most numbers, texts and containers in one decoded request: receiving more would block the API process."""
MAX_CHARACTERS = 1 << 23
"""Most characters of text in one decoded request."""


def decoded(body: bytes, decoder: type[T] | Callable[[bytes], T], *, dialect: bool) -> T:
    """Return the body decoded by `decoder`, a struct type or a function."""
    if not isinstance(decoder, type):
        return decoder(body)
    return decode_dialect(body, decoder) if dialect else decode_json(body, decoder)


def decode_body(context: TaskContext, body: bytes, decoder: str, dialect: bool) -> bytes:
    """Helper task: return the name of the value's type, a line break, and the value as MessagePack. `decoder`: the name
    of a struct, or of a function from bytes to a struct. `dialect`: accept unknown fields with empty values, as clients
    of other servers send them."""
    value = decoded(body, find(decoder), dialect=dialect)
    if isinstance(value, CoserveError):  # a decoder may return an error
        return name_of(Failure).encode() + b"\n" + msgspec.msgpack.encode(failure_of(value))
    _check_size(value)
    try:
        return name_of(type(value)).encode() + b"\n" + msgspec.msgpack.encode(value)
    except OverflowError:
        raise InvalidRequest("expected integers of at most 64 bits in a request of this size") from None


def unpack(result: bytes) -> object:
    """The value in a result of `decode_body`."""
    end = result.index(b"\n")
    value: object = msgspec.msgpack.decode(memoryview(result)[end + 1 :], type=find(result[:end].decode()))
    return error_of(value) if isinstance(value, Failure) else value


def _check_size(value: msgspec.Struct) -> None:
    """Raise `InvalidRequest` for more values, or longer texts, than the API process can receive without blocking."""
    values, characters = 0, 0
    left: list[object] = [msgspec.to_builtins(value, builtin_types=(bytes,))]
    while left:
        found = left.pop()
        values += 1
        if isinstance(found, str):
            characters += len(found)
        elif isinstance(found, dict):
            left += found.keys()
            left += found.values()
        elif isinstance(found, list):
            left += found
        if values > MAX_VALUES:
            raise InvalidRequest(f"expected at most {MAX_VALUES} values in one request")
        if characters > MAX_CHARACTERS:
            raise InvalidRequest(f"expected at most {MAX_CHARACTERS} characters of text in one request")


def decode_corpus(context: TaskContext, body: bytes, file: str) -> FinetuneRequest:
    """Helper task: return a `FinetuneRequest`. Its `data` go to the JSONL file `file`, unless it also has a `path`."""
    request = decode_json(body, FinetuneRequest)
    if request.data is None:
        return request
    if request.path is not None:
        return msgspec.structs.replace(request, data=[])
    encoder = msgspec.json.Encoder()
    with disk_errors(), Path(file).open("wb") as rows:
        for start in range(0, len(request.data), 1000):
            rows.write(b"".join(encoder.encode(row) + b"\n" for row in request.data[start : start + 1000]))
            context.progress()
    return msgspec.structs.replace(request, data=None)
