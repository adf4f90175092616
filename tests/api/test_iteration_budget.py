"""Ready work is spread over turns of the event loop, and few chunks of merged streams are held at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.api.generation.merge import CHUNKS, merge_streams
from coserve.api.generation.waiting_limit import IterationBudget
from coserve.core.link.channel import api_end, engine_end
from coserve.core.link.generation import Admitted
from coserve.core.link.link import FromEngine
from coserve.core.logprobs import PackedLogprobs, TokenLogprob
from coserve.core.schemas import GenerateChunk


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
