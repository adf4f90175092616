"""What piles up behind a slow reader comes out together, and nothing changes but the cut."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from coserve.api.generation.output_queue import MAX_MERGED, UNMERGED, EngineOutput, OutputQueue
from coserve.core.link.generation import Admitted, RequestFailed, Tokens
from coserve.core.logprobs import PackedLogprobs, TokenLogprob
from coserve.core.types import FinishReason


def tokens(id: str, *ids: int, end: bool = False) -> Tokens:
    logprobs = PackedLogprobs.of(TokenLogprob(-float(each)) for each in ids)
    return Tokens(id=id, tokens=ids, logprobs=logprobs, finished=FinishReason.LENGTH if end else None)


async def drain(inbox: OutputQueue, until: EngineOutput) -> list[EngineOutput]:
    found = [await inbox.get()]
    while found[-1] != until:
        found.append(await inbox.get())
    return found


messages = st.one_of(
    st.builds(lambda name, count: tokens(name, *range(count)), st.sampled_from("ab"), st.integers(0, 3)),
    st.builds(lambda name: tokens(name, 7, end=True), st.sampled_from("ab")),
    st.builds(Admitted, id=st.sampled_from("ab")),
    st.builds(lambda name: RequestFailed(id=name, code="internal_error", message="m"), st.sampled_from("ab")),
)


@given(st.lists(messages, max_size=40))
def test_joining_keeps_order_tokens_and_ends(said: list[EngineOutput]) -> None:
    last = Admitted(id="last", at=0.0)

    async def run() -> list[EngineOutput]:
        inbox = OutputQueue()
        for message in (*said, last):
            inbox.put(message)
        return await drain(inbox, last)

    found = asyncio.run(run())
    assert _flat(found) == _flat([*said, last])
    for before, after in pairwise(found):
        if isinstance(before, Tokens) and isinstance(after, Tokens) and before.id == after.id:
            assert before.finished is not None, "two messages that could have been one"


def _flat(said: list[EngineOutput]) -> list[object]:
    """One entry a token, end or other message."""
    flat: list[object] = []
    for message in said:
        if isinstance(message, Tokens):
            flat += [(message.id, *pair) for pair in zip(message.tokens, message.logprobs, strict=True)]
            flat += [] if message.finished is None else [(message.id, message.finished)]
        else:
            flat.append(message)
    return flat


async def test_a_message_alone_is_not_waited_for_more_of() -> None:
    inbox = OutputQueue()
    got = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    assert not got.done()
    inbox.put(tokens("a", 1))
    assert await got == tokens("a", 1)


def test_what_waits_long_is_held_in_few_messages() -> None:
    inbox = OutputQueue()
    for number in range(UNMERGED + 10 * MAX_MERGED):
        inbox.put(tokens("a", number))
    assert len(inbox) <= UNMERGED + 11
