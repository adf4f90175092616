"""Large answers are encoded in pieces, and large messages of the engine are taken in parts."""

from __future__ import annotations

import msgspec
import pytest

from coserve.api.generation.inbox import MOST, Inbox
from coserve.api.http.pieces import LIGHT, pieces, weight
from coserve.link import Tokens
from coserve.schemas import Choice, GenerateResponse, Logprob, PromptLogprob, Timing, Usage
from coserve.types import FinishReason, TokenLogprob


def response(tokens: int, scored: int) -> GenerateResponse:
    top = [Logprob(token_id=id, token=str(id), logprob=-0.5) for id in range(5)]
    entries = [PromptLogprob(token_id=5, token='a "quote"', logprob=None, top=top)] * scored
    choice = Choice(index=0, text="x" * tokens, token_ids=list(range(tokens)), finish_reason="length")
    usage = Usage(prompt_tokens=1, completion_tokens=tokens, total_tokens=tokens + 1)
    return GenerateResponse(
        id="a", adapter=None, version=None, seed=1, choices=[choice] * 3, usage=usage,
        timing=Timing(queue=None, ttft=1.0, e2e=2.0), prompt_logprobs=entries,
    )  # fmt: skip


@pytest.mark.parametrize(
    "value", [response(3, 0), response(0, 0), response(50_000, 20_000), [], [1] * 9000, {"a": [2]}]
)
def test_pieces_are_what_one_call_gives(value: object) -> None:
    parts = list(pieces(value))
    assert b"".join(parts) == msgspec.json.encode(value)
    assert max(map(len, parts)) < 70 * LIGHT
    assert len(parts) > 1 or weight(value) <= LIGHT


async def test_messages_that_pile_up_come_in_parts() -> None:
    inbox, scored = Inbox(), TokenLogprob(-0.5)
    inbox.put(Tokens(id="a", tokens=(), prompt_logprobs=(scored,) * 1000))
    for number in range(1000):
        inbox.put(Tokens(id="a", tokens=(number,), finished=FinishReason.STOP if number == 999 else None))
    found = []
    while not found or found[-1].finished is None:
        message = await inbox.get()
        assert isinstance(message, Tokens)
        assert len(message.tokens) + len(message.prompt_logprobs) <= MOST
        found.append(message)
    assert [token for message in found for token in message.tokens] == list(range(1000))
    assert sum(len(message.prompt_logprobs) for message in found) == 1000
    assert len(found) < 20
