"""What a helper process gives back of a large body is small enough to be received without blocking."""

from __future__ import annotations

import msgspec
import pytest

from coserve.api.http.decode_tasks import MAX_CHARACTERS, MAX_VALUES, DecodeBodyArguments, decode_body, unpack
from coserve.api.openai.schemas import ChatRequest, CompletionRequest
from coserve.core.errors import InvalidRequest
from coserve.data.offload.protocol import TaskContext, name_of
from tests.support.api_server import tokenizer


def decode(body: dict[str, object], type: type[msgspec.Struct]) -> object:
    arguments = DecodeBodyArguments(name_of(type), dialect=True, context=None)
    context = TaskContext(tokenizer(), lambda: None)
    return unpack(decode_body(context, msgspec.msgpack.encode(arguments), msgspec.json.encode(body)))


def chat(characters: int) -> dict[str, object]:
    """Messages of so many characters together, names of fields and roles included."""
    overhead = len("messages") + 2 * len("role" + "content" + "user")
    half = (characters - overhead) // 2
    texts = ("x" * half, "y" * (characters - overhead - half))
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def test_the_characters_of_all_texts_together_are_counted() -> None:
    fits = decode(chat(MAX_CHARACTERS - 1000), ChatRequest)
    assert isinstance(fits, ChatRequest) and len(fits.messages) == 2
    with pytest.raises(InvalidRequest, match=f"at most {MAX_CHARACTERS} characters of text"):
        decode(chat(MAX_CHARACTERS + 1), ChatRequest)


def test_so_are_its_values() -> None:
    fits = decode({"prompt": [7] * (MAX_VALUES - 1000)}, CompletionRequest)
    assert isinstance(fits, CompletionRequest)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_VALUES} values"):
        decode({"prompt": [7] * (MAX_VALUES + 1)}, CompletionRequest)
