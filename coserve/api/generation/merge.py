"""Runs several requests as one: merges their streams, or gathers their results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import TypeVar

from coserve.core.cancellation import cancel_all, uncancelled
from coserve.core.schemas.generation import GenerateChunk

Chunks = AsyncGenerator[GenerateChunk, None]
ChunkQueue = asyncio.Queue[tuple[int, GenerateChunk | Exception | None]]
"""Entries: the stream's number, and its next chunk; at its end None, or the error that it raised."""
T = TypeVar("T")
GROUP = 16
"""Requests started or cancelled per event-loop iteration."""
CHUNKS = 16
"""Most chunks in the queue, and most that the streams hold beside it; further engine messages stay undecoded."""


async def _start(coroutines: Iterable[Coroutine[None, None, T]], tasks: list[asyncio.Task[T]]) -> None:
    """Append a task for each coroutine to `tasks`."""
    left = iter(coroutines)
    try:
        for coroutine in left:
            tasks.append(asyncio.create_task(coroutine))
            if len(tasks) % GROUP == 0:
                await asyncio.sleep(0)
    finally:
        for coroutine in left:
            coroutine.close()  # never started


async def _cancel(tasks: Sequence[asyncio.Task[T]]) -> None:
    """Cancel all tasks and wait until they have ended."""
    for first in range(0, len(tasks), GROUP):
        await cancel_all(tasks[first : first + GROUP])


async def merge_streams(
    streams: Sequence[Callable[[asyncio.Semaphore], Chunks]],
) -> AsyncGenerator[tuple[int, GenerateChunk], None]:
    """Yield the chunks of all streams as they come, each with its stream's number.

    A stream makes and yields a chunk only while it holds the semaphore passed to it. The first error, and closing the
    generator early, cancel all streams.
    """
    semaphore = asyncio.Semaphore(CHUNKS)
    if len(streams) == 1:
        async with aclosing(streams[0](semaphore)) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: ChunkQueue = asyncio.Queue(CHUNKS)
    tasks: list[asyncio.Task[None]] = []
    try:
        await _start((_follow(number, stream(semaphore), queue) for number, stream in enumerate(streams)), tasks)
        left = len(tasks)
        while left:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield number, item
    finally:
        await uncancelled(asyncio.create_task(_cancel(tasks)))  # even if the caller is cancelled meanwhile


async def _follow(number: int, stream: Chunks, queue: ChunkQueue) -> None:
    end: Exception | None = None
    try:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                await queue.put((number, chunk))
    except Exception as error:  # noqa: BLE001 - the reader raises it
        end = error
    await queue.put((number, end))


async def gather(calls: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Return all results, in order. The first error cancels the other calls."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks: list[asyncio.Task[T]] = []
    try:
        await _start(calls, tasks)
        return await asyncio.gather(*tasks)
    finally:
        await uncancelled(asyncio.create_task(_cancel(tasks)))  # even if the caller is cancelled meanwhile
