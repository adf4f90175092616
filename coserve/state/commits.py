"""Changes of files and registry rows that run to their end even if the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from coserve.core.cancellation import uncancelled

T = TypeVar("T")


class Commits:
    """Runs each change in its own task. The caller keeps its lock or upload folder until the change has ended."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, change: Coroutine[Any, Any, T]) -> T:
        """Return the result of `change`, or raise what it raises. See `uncancelled`."""
        task = asyncio.create_task(change)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await uncancelled(task)

    async def close(self) -> None:
        """Wait for all running changes."""
        while self._running:
            await asyncio.wait(self._running)
