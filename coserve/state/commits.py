"""Changes of files and registry rows that are completed even if the caller is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from coserve.errors import AdapterError, CorpusError, QueueFull, RequestError

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_REFUSALS = (RequestError, CorpusError, AdapterError, QueueFull)
"""Errors of the request itself. They are not logged when the client has left."""


async def uncancelled(task: asyncio.Task[T]) -> T:
    """The task's result. If the caller is cancelled, the task is completed first; its failure is then logged, unless it is an
    error of the request."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as left:
            cancelled = left
    if cancelled is not None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, _REFUSALS):
            log.error("a change failed after its client had left: %s", error, exc_info=error)
        raise cancelled
    return task.result()


async def uncancelled_thread(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """The result of `call`, run in a thread. As `uncancelled`: it is completed first if the caller is cancelled."""
    return await uncancelled(asyncio.create_task(asyncio.to_thread(call, *arguments, **options)))


class Commits:
    """Runs changes in tasks of their own. The caller keeps its lock or upload folder until the change has ended."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, change: Coroutine[Any, Any, T]) -> T:
        """The result of `change`; raises what it raises. See `uncancelled`."""
        task = asyncio.create_task(change)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await uncancelled(task)

    async def close(self) -> None:
        """Wait for all running changes."""
        while self._running:
            await asyncio.wait(self._running)
