"""Large answers are encoded in pieces, and large messages of the engine are taken in parts."""

from __future__ import annotations

import msgspec
import pytest

from coserve.api.generation.output_queue import MAX_MERGED, OutputQueue
from coserve.api.http.json_blocks import VALUES_AT_ONCE, JsonListBuilder, count_values, encode_in_chunks
from coserve.core.link.generation import Tokens
from coserve.core.logprobs import PackedLogprobs, TokenLogprob
from coserve.core.schemas import Choice, GenerateResponse, Logprob, PromptLogprob, Timing, Usage
from coserve.core.types import FinishReason


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
