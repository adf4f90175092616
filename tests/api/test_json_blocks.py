"""Large answers are encoded in pieces, large messages taken in parts; what a helper process gives back is small."""

from __future__ import annotations

import msgspec
import pytest

from coserve.api.generation.output_queue import MAX_MERGED, OutputQueue
from coserve.api.http.decode_tasks import MAX_CHARACTERS, MAX_VALUES, DecodeBodyArguments, decode_body, unpack
from coserve.api.http.json_blocks import VALUES_AT_ONCE, JsonListBuilder, count_values, encode_in_chunks
from coserve.api.openai.schemas import ChatRequest, CompletionRequest
from coserve.core.errors import InvalidRequest
from coserve.core.link.generation import Tokens
from coserve.core.logprobs import PackedLogprobs, TokenLogprob
from coserve.core.schemas import Choice, GenerateResponse, Logprob, PromptLogprob, Timing, Usage
from coserve.core.types import FinishReason
from coserve.data.offload.protocol import TaskContext, name_of
from tests.support.api_server import tokenizer


def response(tokens: int, scored: int) -> GenerateResponse:
    top = [Logprob(token_id=id, token=str(id), logprob=-0.5) for id in range(5)]
    entries = [PromptLogprob(token_id=5, token='a "quote"', text='a "quote"', logprob=None, top=top)] * scored
    choice = Choice(index=0, text="x" * tokens, token_ids=list(range(tokens)), finish_reason="length")
    usage = Usage(prompt_tokens=1, completion_tokens=tokens, total_tokens=tokens + 1)
    return GenerateResponse(
        id="a",
        adapter=None,
        version=None,
        seed=1,
        choices=[choice] * 3,
        usage=usage,
        timing=Timing(queue=None, ttft=1.0, e2e=2.0),
        prompt_logprobs=entries,
    )


@pytest.mark.parametrize(
    "value", [response(3, 0), response(0, 0), response(50_000, 20_000), [], [1] * 9000, {"a": [2]}]
)
def test_pieces_are_what_one_call_gives(value: object) -> None:
    parts = list(encode_in_chunks(value))
    assert b"".join(parts) == msgspec.json.encode(value)
    assert max(map(len, parts)) < 70 * VALUES_AT_ONCE
    assert len(parts) > 1 or count_values(value) <= VALUES_AT_ONCE


@pytest.mark.parametrize("count", [0, 1, 40, 30_000])
def test_a_list_that_was_encoded_as_it_grew(count: int) -> None:
    entries = [PromptLogprob(token_id=id, token="a", text="a", logprob=None) for id in range(count)]
    packed, rest = JsonListBuilder[PromptLogprob](), JsonListBuilder[PromptLogprob]()
    for first in range(0, count, 7):
        (packed if first < count // 2 else rest).add(entries[first : first + 7])
    whole = response(3, 0)
    grown = msgspec.structs.replace(whole, prompt_logprobs=JsonListBuilder.joined([packed, rest]))
    listed = msgspec.json.encode(msgspec.structs.replace(whole, prompt_logprobs=entries))
    parts = list(encode_in_chunks(grown))
    assert b"".join(parts) == listed
    assert max(map(len, parts)) < 70 * VALUES_AT_ONCE


def test_heavy_entries_in_the_middle_of_a_long_list_are_weighed() -> None:
    light, heavy = ["x"], ["x"] * 100
    for count in (1000, 5000):
        value = [light] * count + [heavy] * count + [light] * count
        assert 0.9 < count_values(value) / (count * 107) < 1.1


async def test_messages_that_pile_up_come_in_parts() -> None:
    inbox, scored = OutputQueue(), TokenLogprob(-0.5)
    for _ in range(100):
        inbox.put(Tokens(id="a", tokens=(), prompt_logprobs=PackedLogprobs.of([scored] * 10)))
    for number in range(1000):
        inbox.put(Tokens(id="a", tokens=(number,), finished=FinishReason.STOP if number == 999 else None))
    found = []
    while not found or found[-1].finished is None:
        message = await inbox.get()
        assert isinstance(message, Tokens)
        assert len(message.tokens) + len(message.prompt_logprobs) <= MAX_MERGED
        found.append(message)
    assert [token for message in found for token in message.tokens] == list(range(1000))
    assert sum(len(message.prompt_logprobs) for message in found) == 1000
    assert len(found) < 20


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
