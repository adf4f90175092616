"""Helper tasks that decode large JSON bodies. Their results are small, or already checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coserve.api.generation.async_tokenizer import MAX_INLINE_CHARACTERS, check_tokens
from coserve.api.generation.prompts import check_characters
from coserve.api.http.parsing import decode_dialect, decode_json
from coserve.core.errors import CoserveError, InvalidRequest
from coserve.core.schemas import FinetuneRequest
from coserve.data.offload.protocol import Failure, TaskContext, error_of, failure_of, find, name_of
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.state.durable import disk_errors

T = TypeVar("T")

MAX_VALUES = 1 << 18
"""Most numbers, texts and containers in one decoded request: receiving more would block the API process."""
MAX_CHARACTERS = 1 << 21
"""Most characters of text in one decoded request, once long prompts are tokenised."""


class DecodeBodyArguments(msgspec.Struct, frozen=True):
    """Arguments of `decode_body`. `decoder` names a struct, or a function from bytes to a struct. `context`: the base's
    context length in tokens."""

    decoder: str
    dialect: bool
    """Accept unknown fields with empty values, as clients of other servers send them."""
    context: int | None


def decoded(body: bytes, decoder: type[T] | Callable[[bytes], T], *, dialect: bool) -> T:
    """Return the body decoded by `decoder`, a struct type or a function."""
    if not isinstance(decoder, type):
        return decoder(body)
    return decode_dialect(body, decoder) if dialect else decode_json(body, decoder)


def decode_body(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Helper task: return the name of the value's type, a line break, and the value as MessagePack."""
    options = msgspec.msgpack.decode(arguments, type=DecodeBodyArguments)
    value = decoded(body, find(options.decoder), dialect=options.dialect)
    if isinstance(value, CoserveError):  # a decoder may return an error
        return name_of(Failure).encode() + b"\n" + msgspec.msgpack.encode(failure_of(value))
    if options.context is not None:
        value = with_token_ids(value, context.tokenizer, options.context)
    _check_size(value)
    try:
        return name_of(type(value)).encode() + b"\n" + msgspec.msgpack.encode(value)
    except OverflowError:
        raise InvalidRequest("expected integers of at most 64 bits in a request of this size") from None


def unpack(result: bytes) -> object:
    """The value in a result of `decode_body`."""
    name, _, packed = result.partition(b"\n")
    value: object = msgspec.msgpack.decode(packed, type=find(name.decode()))
    return error_of(value) if isinstance(value, Failure) else value


def with_token_ids(value: msgspec.Struct, tokenizer: Tokenizer, context: int) -> msgspec.Struct:
    """Return the request with long prompts as token ids. Raises `PromptTooLong` for a prompt that fills the context.

    A prompt that is echoed stays a text, because detokenising its ids could give a different text.
    """
    prompt = getattr(value, "prompt", None)
    if isinstance(prompt, str):
        found: Any = _tokenized_if_long(prompt, tokenizer, context)
    elif isinstance(prompt, list) and prompt and all(isinstance(entry, int) for entry in prompt):
        found = _tokenized_if_long(prompt, tokenizer, context)
    elif isinstance(prompt, list) and all(isinstance(entry, str) for entry in prompt):
        found = [_tokenized_if_long(entry, tokenizer, context) for entry in prompt]
        if any(isinstance(entry, str) for entry in found):  # all entries are texts, or none
            found = [tokenizer.encode(entry) if isinstance(entry, str) else entry for entry in found]
            found = prompt if not all(found) else found
    elif isinstance(prompt, list):
        found = [
            _tokenized_if_long(entry, tokenizer, context) if isinstance(entry, list) else entry for entry in prompt
        ]
    else:
        return value
    return value if getattr(value, "echo", False) else msgspec.structs.replace(value, prompt=found)


def _tokenized_if_long(prompt: str | list[int], tokenizer: Tokenizer, context: int) -> str | list[int]:
    if isinstance(prompt, str):
        check_characters(len(prompt), context, "prompt")
        if len(prompt) <= MAX_INLINE_CHARACTERS:
            return prompt
        prompt = tokenizer.encode(prompt)
    check_tokens(len(prompt), context, "prompt")
    return prompt


def _check_size(value: msgspec.Struct) -> None:
    """Raise `InvalidRequest` for more values, or longer texts, than the API process can receive without blocking."""
    values, characters = 0, 0
    left: list[object] = [msgspec.to_builtins(value)]
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


class DecodeCorpusArguments(msgspec.Struct, frozen=True):
    """Arguments of `decode_corpus`. `file`: path for the rows."""

    file: str


def decode_corpus(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Helper task: return a `FinetuneRequest` as MessagePack. Its `data` go to a JSONL file, unless it also has a
    `path`."""
    options = msgspec.msgpack.decode(arguments, type=DecodeCorpusArguments)
    request = decode_json(body, FinetuneRequest)
    if request.data is None:
        return msgspec.msgpack.encode(request)
    if request.path is not None:
        return msgspec.msgpack.encode(msgspec.structs.replace(request, data=[]))
    encoder = msgspec.json.Encoder()
    with disk_errors(), Path(options.file).open("wb") as file:
        for start in range(0, len(request.data), 1000):
            file.write(b"".join(encoder.encode(row) + b"\n" for row in request.data[start : start + 1000]))
            context.progress()
    return msgspec.msgpack.encode(msgspec.structs.replace(request, data=None))
