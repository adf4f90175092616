"""Changes of files and registry rows that, once begun, run to their end whatever becomes of whoever asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def uncancelled(task: asyncio.Task[T]) -> T:
    """The task's result. A caller that is cancelled meanwhile waits for the task's end, and only then is cancelled."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: nobody is left to tell
        raise cancelled
    return task.result()


class Commits:
    """Runs changes in tasks of their own. What the caller holds (a lock, a folder of uploads) it holds until the end."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, change: Coroutine[Any, Any, T]) -> T:
        """The result of `change`; raises what it raises. See `uncancelled`."""
        task = asyncio.create_task(change)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await uncancelled(task)

    async def close(self) -> None:
        """Wait for all that was begun."""
        while self._running:
            await asyncio.wait(self._running)
