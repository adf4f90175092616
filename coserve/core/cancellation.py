"""Cancel work that runs on a thread, and protect work that must finish although its caller is cancelled. No torch.

`Cancellation.check` also releases the interpreter's lock (GIL), so that the engine's tick is not held up.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ParamSpec, TypeVar

from coserve.core.errors import AdapterError, CorpusError, QueueFull, RequestError

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_REFUSALS = (RequestError, CorpusError, AdapterError, QueueFull)
"""Errors that the request caused. They are not logged once the client has left."""
HOLD, REST = 0.001, 0.002
"""Seconds. A thread computes in Python for `HOLD`, then sleeps for `REST`. A tick acquires the GIL hundreds of times;
without the sleeps each acquisition would take one of the interpreter's switch intervals."""


class Cancelled(Exception):
    """Raised in the working thread: nobody needs the result any more."""


class Cancellation:
    """A flag that the working thread polls."""

    def __init__(self) -> None:
        self._cancelled, self._since = threading.Event(), time.monotonic()
        self._lock, self._calls = threading.Lock(), list[Callable[[], None]]()

    def cancel(self) -> None:
        """End the work at its next `check`. Any thread may call it, also after the work has ended."""
        with self._lock:
            self._cancelled.set()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def on_cancel(self, call: Callable[[], None]) -> None:
        """Register `call`: `cancel` calls it once, on the thread of `cancel`. Raise `Cancelled` if already
        cancelled."""
        with self.postponed():
            self._calls.append(call)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Make `cancel` wait until the block ends. Raise `Cancelled` if already cancelled."""
        with self._lock:
            if self._cancelled.is_set():
                raise Cancelled
            yield

    def check(self) -> None:
        """Raise `Cancelled` if cancelled. The working thread calls it at least once per millisecond of computing."""
        if time.monotonic() - self._since > HOLD:
            self._cancelled.wait(REST)
            self._since = time.monotonic()
        if self._cancelled.is_set():
            raise Cancelled

    def wait(self, seconds: float) -> None:
        """Sleep on the working thread. Raise `Cancelled` as soon as the work is cancelled."""
        if self._cancelled.wait(seconds):
            raise Cancelled


def unchecked() -> None:
    """Do nothing: the `check` of work that is never cancelled."""


async def uncancelled(task: asyncio.Task[T]) -> T:
    """Return the task's result. If the caller is cancelled, let the task finish first; log its failure unless the
    request caused it."""
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
    """Run `call` in a thread and return its result. If the caller is cancelled, the call finishes first, as in
    `uncancelled`."""
    return await uncancelled(asyncio.create_task(asyncio.to_thread(call, *arguments, **options)))


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended. Their errors are dropped."""
    ending = tuple(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def keep_task(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """Start a task that is in `tasks` until it ends: the event loop alone does not keep it."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a task group that raises the first error of its tasks alone."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


class Commits:
    """Runs each change in its own task. The caller keeps its lock or upload folder until the change has ended."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, change: Coroutine[Any, Any, T]) -> T:
        """Return the result of `change`, or raise what it raises. See `uncancelled`."""
        return await uncancelled(keep_task(change, self._running))

    async def close(self) -> None:
        """Wait for all running changes."""
        while self._running:
            await asyncio.wait(self._running)
