"""Cancellation of work on a thread, which also releases the interpreter's lock (GIL) to the engine's tick; and work
that is completed even if its caller is cancelled. No torch."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from coserve.core.errors import AdapterError, CorpusError, QueueFull, RequestError

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_REFUSALS = (RequestError, CorpusError, AdapterError, QueueFull)
"""Errors of the request itself. They are not logged when the client has left."""
HOLD, REST = 0.001, 0.002
"""Seconds: a thread computes in Python for `HOLD`, then sleeps for `REST`. A tick acquires the GIL hundreds of times;
without the sleeps, each time would take one of the interpreter's switch intervals."""


class Cancelled(Exception):
    """The work's result is no longer needed."""


class Cancellation:
    """A flag that the work checks. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._cancelled, self._clock, self._since = threading.Event(), clock, clock()
        self._lock, self._calls = threading.Lock(), list[Callable[[], None]]()

    def cancel(self) -> None:
        """End the work at its next `check`. May be called on any thread, also when the work has ended and its result is
        not used."""
        with self._lock:
            self._cancelled.set()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def on_cancel(self, call: Callable[[], None]) -> None:
        """`cancel` calls it once, on its own thread. Raises `Cancelled` if the work is cancelled already."""
        with self.postponed():
            self._calls.append(call)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """`cancel` waits while inside. Raises `Cancelled` if the work is cancelled already."""
        with self._lock:
            if self._cancelled.is_set():
                raise Cancelled
            yield

    def check(self) -> None:
        """Called on the working thread, at least once in a millisecond of computing. Raises `Cancelled`."""
        if self._clock() - self._since > HOLD:
            self._cancelled.wait(REST)
            self._since = self._clock()
        if self._cancelled.is_set():
            raise Cancelled

    def wait(self, seconds: float) -> None:
        """Sleep on the working thread. Raises `Cancelled` as soon as the work is cancelled."""
        if self._cancelled.wait(seconds):
            raise Cancelled


def unchecked() -> None:
    """The `check` of work that is never cancelled."""


async def uncancelled(task: asyncio.Task[T]) -> T:
    """The task's result. If the caller is cancelled, the task is completed first; its failure is then logged, unless it
    is an error of the request."""
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
