"""Tasks that read large JSON bodies: the API process gets back what is small, or already checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coserve.api.generation.async_tokenizer import check_tokens
from coserve.api.generation.prompts import check_characters
from coserve.api.http.parsing import decode_dialect, decode_json
from coserve.errors import CoserveError, InvalidRequest
from coserve.offload.protocol import Failure, TaskContext, error_of, failure_of, find, name_of
from coserve.pretrained.tokenizer import Tokenizer
from coserve.schemas import FinetuneRequest
from coserve.state.durable import disk_errors

T = TypeVar("T")

MAX_VALUES = 1 << 18
"""Numbers, texts and containers of one decoded request: more would hold up the process that takes them over."""
MAX_CHARACTERS = 1 << 21
"""Of all texts of one decoded request, after the prompts that can be are tokenised."""
LONG_TEXT = 4096
"""Characters of a prompt from which on it is tokenised here."""


class Decode(msgspec.Struct, frozen=True):
    """`decoder` names a struct, or a function from bytes to a struct. `context`: of the base, in tokens."""

    decoder: str
    dialect: bool
    """Read a struct as other servers' clients write it."""
    context: int | None


def decoded(body: bytes, decoder: type[T] | Callable[[bytes], T], *, dialect: bool) -> T:
    """What a struct's type, or a function, makes of a body."""
    if not isinstance(decoder, type):
        return decoder(body)
    return decode_dialect(body, decoder) if dialect else decode_json(body, decoder)


def decode_body(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """The name of the value's type, a line break, and the value as MessagePack."""
    options = msgspec.msgpack.decode(arguments, type=Decode)
    value = decoded(body, find(options.decoder), dialect=options.dialect)
    if isinstance(value, CoserveError):  # a decoder may return what is wrong
        return name_of(Failure).encode() + b"\n" + msgspec.msgpack.encode(failure_of(value))
    if options.context is not None:
        value = with_token_ids(value, context.tokenizer, options.context)
    _check_weight(value)
    return name_of(type(value)).encode() + b"\n" + msgspec.msgpack.encode(value)


def unpack(result: bytes) -> object:
    """What `decode_body` packed."""
    name, _, packed = result.partition(b"\n")
    value: object = msgspec.msgpack.decode(packed, type=find(name.decode()))
    return error_of(value) if isinstance(value, Failure) else value


def with_token_ids(value: msgspec.Struct, tokenizer: Tokenizer, context: int) -> msgspec.Struct:
    """The request with long prompts as token ids. Raises `PromptTooLong` for a prompt that fills the context.

    A prompt that is echoed stays a text: it could look different when its ids are made into a text again.
    """
    prompt = getattr(value, "prompt", None)
    if isinstance(prompt, str):
        found: Any = _shorter(prompt, tokenizer, context)
    elif isinstance(prompt, list) and prompt and all(isinstance(entry, int) for entry in prompt):
        found = _shorter(prompt, tokenizer, context)
    elif isinstance(prompt, list) and all(isinstance(entry, str) for entry in prompt):
        found = [_shorter(entry, tokenizer, context) for entry in prompt]
        if any(isinstance(entry, str) for entry in found):  # all of them, or none
            found = [tokenizer.encode(entry) if isinstance(entry, str) else entry for entry in found]
            found = prompt if not all(found) else found
    elif isinstance(prompt, list):
        found = [_shorter(entry, tokenizer, context) if isinstance(entry, list) else entry for entry in prompt]
    else:
        return value
    return value if getattr(value, "echo", False) else msgspec.structs.replace(value, prompt=found)


def _shorter(prompt: str | list[int], tokenizer: Tokenizer, context: int) -> str | list[int]:
    if isinstance(prompt, str):
        check_characters(len(prompt), context, "prompt")
        if len(prompt) <= LONG_TEXT:
            return prompt
        prompt = tokenizer.encode(prompt)
    check_tokens(len(prompt), context, "prompt")
    return prompt


def _check_weight(value: msgspec.Struct) -> None:
    """Raises `InvalidRequest` for more values, or longer texts, than can be handed over in a moment."""
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


class DecodeCorpus(msgspec.Struct, frozen=True):
    """`file`: where the rows go."""

    file: str


def decode_corpus(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """A `FinetuneRequest` as MessagePack; its `data`, if it has no `path` too, goes to a JSONL file instead."""
    options = msgspec.msgpack.decode(arguments, type=DecodeCorpus)
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
