"""Several requests as one: their chunks side by side, their end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import TypeVar

from coserve.schemas import GenerateChunk

Chunks = AsyncGenerator[GenerateChunk, None]
ChunkQueue = asyncio.Queue[tuple[int, GenerateChunk | Exception | None]]
"""News of streams; None, or the error that it raised: the stream ended."""
T = TypeVar("T")
GROUP = 16
"""Requests that begin, or end early, in one turn of the event loop."""
CHUNKS = 16
"""Chunks that wait for their reader, and again as many that wait to wait: what the engine says beyond stays packed."""


async def _begin(works: Iterable[Coroutine[None, None, T]], tasks: list[asyncio.Task[T]]) -> None:
    """Put a task for each of `works` into `tasks`."""
    waiting = iter(works)
    try:
        for work in waiting:
            tasks.append(asyncio.create_task(work))
            if len(tasks) % GROUP == 0:
                await asyncio.sleep(0)
    finally:
        for work in waiting:
            work.close()  # never begun


async def _end(tasks: Sequence[asyncio.Task[T]]) -> None:
    """Cancel those that still run and wait for all."""
    for first in range(0, len(tasks), GROUP):
        group = tasks[first : first + GROUP]
        for task in group:
            task.cancel()
        await asyncio.gather(*group, return_exceptions=True)


async def merged(
    streams: Sequence[Callable[[asyncio.Semaphore], Chunks]],
) -> AsyncGenerator[tuple[int, GenerateChunk], None]:
    """The chunks of all streams as they come, each with the number of its stream.

    Each stream makes a chunk, and yields it, only while it holds the semaphore that it is called with. The first error of
    one ends all; so does closing it early.
    """
    turns = asyncio.Semaphore(CHUNKS)
    if len(streams) == 1:
        async with aclosing(streams[0](turns)) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    inbox: ChunkQueue = asyncio.Queue(CHUNKS)
    tasks: list[asyncio.Task[None]] = []
    try:
        await _begin((_follow(number, stream(turns), inbox) for number, stream in enumerate(streams)), tasks)
        left = len(tasks)
        while left:
            number, news = await inbox.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                left -= 1
            else:
                yield number, news
    finally:
        await _end(tasks)


async def _follow(number: int, stream: Chunks, inbox: ChunkQueue) -> None:
    end: Exception | None = None
    try:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                await inbox.put((number, chunk))
    except Exception as error:  # noqa: BLE001 - the reader raises it
        end = error
    await inbox.put((number, end))


async def together(calls: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """All results, in order; the first error ends the others."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks: list[asyncio.Task[T]] = []
    try:
        await _begin(calls, tasks)
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)
