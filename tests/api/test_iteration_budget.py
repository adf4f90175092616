"""Ready work is spread over turns of the event loop, few chunks of merged streams are held at a time, large answers are
encoded in pieces and large messages taken in parts; what a helper process gives back is small."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.api.generation.merge import CHUNKS, merge_streams
from coserve.api.generation.output_queue import MAX_MERGED, OutputQueue
from coserve.api.generation.waiting_limit import IterationBudget
from coserve.api.http.decode_tasks import MAX_CHARACTERS, MAX_VALUES, decode_body, unpack
from coserve.api.http.json_blocks import BLOCK, JsonListBuilder, encode_json
from coserve.api.openai.schemas import ChatRequest, CompletionRequest
from coserve.core.errors import InvalidRequest
from coserve.core.link.channel import api_end, engine_end
from coserve.core.link.generation import Admitted, Tokens
from coserve.core.link.link import FromEngine
from coserve.core.logprobs import PackedLogprobs, TokenLogprob
from coserve.core.schemas.generation import GenerateChunk, PromptLogprob
from coserve.core.types import FinishReason
from coserve.data.offload.protocol import TaskContext, name_of
from tests.support.api_server import tokenizer


async def test_ready_tasks_run_in_order_a_few_an_iteration() -> None:
    budget, iteration, ran = IterationBudget(10), 0, list[tuple[int, int]]()

    async def work(number: int, units: int) -> None:
        await budget.acquire(units)
        ran.append((iteration, number))

    tasks = [asyncio.create_task(work(number, 25 if number == 4 else 5)) for number in range(9)]
    tasks[2].cancel()
    while not all(task.done() for task in tasks):
        iteration += 1
        await asyncio.sleep(0)
    assert [number for _, number in ran] == [0, 1, 3, 4, 5, 6, 7, 8]
    assert all([at for at, _ in ran].count(at) <= 2 for at, _ in ran)


async def test_waiting_work_that_is_cancelled_holds_up_nobody() -> None:
    budget = IterationBudget(1)
    await budget.acquire(1)
    first, second = (asyncio.create_task(budget.acquire(1)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 120)


def chunk(index: int) -> GenerateChunk:
    return GenerateChunk(id="a", adapter=None, version=None, seed=0, index=index, text="", token_ids=[])


async def test_streams_wait_with_making_chunks_until_they_are_read() -> None:
    made = 0

    async def stream(turns: asyncio.Semaphore, count: int = 5) -> AsyncGenerator[GenerateChunk, None]:
        nonlocal made
        for index in range(count):
            async with turns:
                made += 1
                yield chunk(index)

    read: dict[int, list[int]] = {}
    async for number, each in merge_streams([stream] * 200):
        read.setdefault(number, []).append(each.index)
        assert made <= sum(map(len, read.values())) + 2 * CHUNKS
    assert read == {number: [0, 1, 2, 3, 4] for number in range(200)}


async def test_the_error_of_one_stream_ends_all() -> None:
    ended = set()

    async def stream(turns: asyncio.Semaphore, number: int) -> AsyncGenerator[GenerateChunk, None]:
        try:
            async with turns:
                yield chunk(0)
            if number == 3:
                raise ZeroDivisionError
            await asyncio.Event().wait()
        finally:
            ended.add(number)

    with pytest.raises(ZeroDivisionError):
        async for _ in merge_streams([partial(stream, number=number) for number in range(40)]):
            pass
    assert ended == set(range(40))


tops = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(allow_nan=False)), max_size=20).map(tuple)
entries = st.lists(st.builds(TokenLogprob, st.floats(allow_nan=False), tops), max_size=5)


@given(entries, entries)
def test_packed_logprobs_are_what_was_packed(some: list[TokenLogprob], others: list[TokenLogprob]) -> None:
    joined = PackedLogprobs.joined([PackedLogprobs.of(some), PackedLogprobs.of(others)])
    assert list(joined) == some + others
    assert len(joined) == len(some + others)


async def test_a_link_full_of_messages_leaves_the_loop_its_turns() -> None:
    ours, theirs = socket.socketpair()
    api, engine = await api_end(ours), await engine_end(theirs)
    messages: list[FromEngine] = [Admitted(id="x" * 1000, at=0.0)] * 200
    engine.send_all(messages)
    turns, received = 0, 0

    async def count() -> None:
        nonlocal turns
        while received < len(messages):
            turns += 1
            await asyncio.sleep(0)

    async def receive() -> None:
        nonlocal received
        while received < len(messages):
            await api.receive()
            received += 1

    await asyncio.sleep(0.05)  # all of it is in the buffer
    await asyncio.gather(receive(), count())
    assert turns >= 3
    await engine.close()
    await api.close()


@pytest.mark.parametrize("left", ["twice", "in a write that fails"])
async def test_a_client_that_leaves_many_streams_ends_them_all(left: str) -> None:
    """Also if it is told twice, the second time while they are being ended."""
    running, held = set[int](), asyncio.Event()

    def stream(number: int) -> Callable[[asyncio.Semaphore], AsyncGenerator[GenerateChunk, None]]:
        async def chunks(_: asyncio.Semaphore) -> AsyncGenerator[GenerateChunk, None]:
            running.add(number)
            try:
                yield chunk(0)
                await held.wait()
            finally:
                running.discard(number)

        return chunks

    async def read() -> None:
        async with aclosing(merge_streams([stream(number) for number in range(64)])) as chunks:
            async for _ in chunks:
                if left == "in a write that fails":
                    asyncio.get_running_loop().call_soon(task.cancel)
                    raise ConnectionResetError

    task = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    if left == "twice":
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.05)
    assert not running


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
