"""Several requests as one: their chunks side by side, their end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from coserve.schemas import GenerateChunk

Chunks = AsyncGenerator[GenerateChunk, None]
Inbox = asyncio.Queue[tuple[int, GenerateChunk | None]]
"""News of streams; None: the stream ended."""
T = TypeVar("T")
GROUP = 16
"""Requests that begin, or end early, in one turn of the event loop."""


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


async def merged(streams: Sequence[Chunks]) -> AsyncGenerator[tuple[int, GenerateChunk], None]:
    """The chunks of all streams as they come, each with the number of its stream.

    The first error of one ends all; so does closing it early.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    inbox: Inbox = asyncio.Queue()
    tasks: list[asyncio.Task[None]] = []
    try:
        await _begin((_follow(number, stream, inbox) for number, stream in enumerate(streams)), tasks)
        for number, task in enumerate(tasks):
            task.add_done_callback(partial(_report, number, inbox))
        left = len(tasks)
        while left:
            number, news = await inbox.get()
            if news is not None:
                yield number, news
            else:
                tasks[number].result()
                left -= 1
    finally:
        await _end(tasks)


def _report(number: int, inbox: Inbox, _: asyncio.Task[None]) -> None:
    inbox.put_nowait((number, None))


async def _follow(number: int, stream: Chunks, inbox: Inbox) -> None:
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            inbox.put_nowait((number, chunk))


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
