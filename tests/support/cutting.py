"""Clients that leave at the worst moment: a handler is cancelled at its k-th await, as aiohttp does when they go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LONG_ENOUGH = 0.01
"""Seconds in which a thread ends what it was asked to do."""


class Cut:
    """One request that is cancelled at the await number `at`, those of the tasks that it starts counted too.

    `late`: once threads have done what is waited for.
    """

    def __init__(self, at: int, *, late: bool) -> None:
        self._at, self._late, self._count = at, late, 0
        self.task: asyncio.Task[Any] | None = None
        self.ended = asyncio.Event()
        self.done = False
        """It was cancelled."""

    def suspended(self) -> None:
        self._count += 1
        if self._count == self._at and self.task is not None and not self.task.done():
            if self._late:
                time.sleep(LONG_ENOUGH)
            self.task.cancel()
            self.done = True


_cut: ContextVar[Cut | None] = ContextVar("cut", default=None)


class Cutter:
    """Cancels the next request that was aimed at."""

    def __init__(self) -> None:
        self._next: Cut | None = None
        asyncio.get_running_loop().set_task_factory(_start)

    def aim(self, at: int, *, late: bool) -> Cut:
        self._next = Cut(at, late=late)
        return self._next

    def middleware(self) -> Middleware:
        @web.middleware
        async def cut(request: web.Request, handler: Handler) -> web.StreamResponse:
            aimed, self._next = self._next, None
            if aimed is None:
                return await handler(request)
            aimed.task = asyncio.current_task()
            token = _cut.set(aimed)
            try:
                return await _Counted(handler(request), aimed)
            finally:
                aimed.task = None
                aimed.ended.set()
                _cut.reset(token)

        return cut


def _start(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """The loop's tasks; those that an aimed request starts count as its own."""
    cut = _cut.get()
    return asyncio.Task(work if cut is None else _counted(work, cut), loop=loop, **options)


async def _counted(work: Coroutine[Any, Any, Any], cut: Cut) -> Any:
    return await _Counted(work, cut)


class _Counted:
    """Awaits what it is given, and tells the cut of each suspension."""

    def __init__(self, work: Awaitable[Any], cut: Cut) -> None:
        self._work, self._cut = work, cut

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        thrown: BaseException | None = None
        while True:
            try:
                future = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration as stop:
                return stop.value
            self._cut.suspended()
            thrown = None
            try:
                yield future
            except BaseException as error:  # noqa: BLE001  # handed on to what is awaited
                thrown = error
