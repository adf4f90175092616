"""Large answers are encoded in pieces, large messages taken in parts; what a helper process gives back is small."""

from __future__ import annotations

import msgspec
import pytest

from coserve.api.generation.output_queue import MAX_MERGED, OutputQueue
from coserve.api.http.decode_tasks import MAX_CHARACTERS, MAX_VALUES, decode_body, unpack
from coserve.api.http.json_blocks import BLOCK, JsonListBuilder, encode_json
from coserve.api.openai.schemas import ChatRequest, CompletionRequest
from coserve.core.errors import InvalidRequest
from coserve.core.link.generation import Tokens
from coserve.core.logprobs import PackedLogprobs, TokenLogprob
from coserve.core.schemas import PromptLogprob
from coserve.core.types import FinishReason
from coserve.data.offload.protocol import TaskContext, name_of
from tests.support.api_server import tokenizer


class Both(msgspec.Struct):
    both: list[PromptLogprob] = msgspec.field(name="of both")
    text: str


@pytest.mark.parametrize("count", [0, 1, 40, 30_000])
def test_lists_that_were_encoded_as_they_grew(count: int) -> None:
    entries = [PromptLogprob(token_id=id, token="\0", text="a", logprob=None) for id in range(count)]
    some, rest = JsonListBuilder[PromptLogprob](), JsonListBuilder[PromptLogprob]()
    for first in range(0, count, 7):
        (some if first < count // 2 else rest).add(entries[first : first + 7])
    grown = [{"of both": JsonListBuilder.joined([some, rest]), "text": "\0["}, [some.as_list(), rest.as_list()]]
    parts = encode_json(grown)
    both, (first_ones, others) = msgspec.json.decode(b"".join(parts), type=tuple[Both, list[list[PromptLogprob]]])
    assert both == Both(entries, "\0[")
    assert first_ones + others == entries
    assert max(map(len, parts)) < 2 * BLOCK


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
    context = TaskContext(tokenizer(), lambda: None)
    return unpack(decode_body(context, msgspec.json.encode(body), name_of(type), dialect=True))


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
