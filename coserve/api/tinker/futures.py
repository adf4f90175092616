"""Requests of Tinker's API whose results are retrieved later by id (`Futures`), and the order in which the requests of
one model begin (`Order`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec

from coserve.core.access.principal import principal
from coserve.core.cancellation import cancel_all
from coserve.core.errors import CoserveError, InternalError, QueueFull, SessionEnded

log = logging.getLogger(__name__)

Result = bytes | msgspec.Struct
"""Protobuf, or a struct that becomes JSON."""
POLL = 30.0
"""Most seconds for which a client waits in one request; the SDK gives up after 45."""
KEPT = 120.0
"""Seconds that a result is kept after its retrieval: the response may be lost on its way."""
MAX_KEPT = 100_000
"""Most results; beyond it the oldest are forgotten."""
MAX_KEPT_BYTES = 256 << 20
"""Most bytes of protobuf results that are kept; beyond it the oldest are forgotten, except the newest one."""
MAX_EARLY = 256
"""Most requests of a model that came before their turn."""


class Futures:
    """All requests that were accepted."""

    def __init__(self, most_bytes: int = MAX_KEPT_BYTES) -> None:
        self._tasks: dict[str, asyncio.Task[Result | CoserveError]] = {}
        self._most_bytes, self._bytes = most_bytes, 0
        self._sizes: dict[str, int] = {}
        """Size in bytes of each protobuf result that is kept, oldest first; `_bytes` is their sum. Other results are
        small and not counted."""
        self._projects: dict[str, str] = {}
        """The project of each request."""

    def __contains__(self, id: str) -> bool:
        """Whether a request with this id exists that the principal may see."""
        return id in self._tasks and principal().sees(self._projects[id])

    def start(self, id: str, work: Coroutine[Any, Any, Result]) -> None:
        """Begin a request. Its id must be new."""
        assert id not in self._tasks, f"request {id} came twice"
        task = self._tasks[id] = asyncio.create_task(_settled(work))
        self._projects[id] = principal().project
        task.add_done_callback(lambda task: self._ended(id, task))
        task.add_done_callback(lambda _: work.close())  # it may not have begun
        while len(self._tasks) > MAX_KEPT:
            self._forget(next(iter(self._tasks)))

    def _ended(self, id: str, task: asyncio.Task[Result | CoserveError]) -> None:
        if task.cancelled() or task.exception() is not None or self._tasks.get(id) is not task:
            return
        if isinstance(result := task.result(), bytes):
            self._sizes[id] = len(result)
            self._bytes += len(result)
        while len(self._sizes) > 1 and self._bytes > self._most_bytes:
            self._forget(next(iter(self._sizes)))

    async def retrieve(self, id: str) -> Result | None:
        """Wait for a result; None: it is not there yet. Raises the request's error, and `SessionEnded` for an id that
        is not known any more."""
        task = self._tasks.get(id)
        if task is None or id not in self:
            why = "its result was retrieved or dropped for later ones, or the daemon was restarted"
            raise SessionEnded(f"no request {id!r}: {why}")
        await asyncio.wait({task}, timeout=POLL)
        if not task.done():
            return None
        asyncio.get_running_loop().call_later(KEPT, self._forget, id)
        if task.cancelled():
            raise SessionEnded(f"request {id!r} was cancelled")
        if (error := task.exception()) is not None:
            log.error("request %s failed", id, exc_info=error)
            raise InternalError("internal error")
        if isinstance(result := task.result(), CoserveError):
            raise result.with_traceback(None)
        return result

    def cancel(self, id: str) -> None:
        if id in self:
            self._tasks[id].cancel()

    def _forget(self, id: str) -> None:
        if (task := self._tasks.pop(id, None)) is not None:
            del self._projects[id]
            self._bytes -= self._sizes.pop(id, 0)
            task.cancel()

    async def close(self) -> None:
        await cancel_all(self._tasks.values())


async def _settled(work: Coroutine[Any, Any, Result]) -> Result | CoserveError:
    """Return the result, or the error without its traceback, whose frames would hold the request as long as it."""
    try:
        return await work
    except CoserveError as error:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return error


class Order:
    """Begins the requests of one model by number, from 1; those that come too early wait for the others."""

    def __init__(self) -> None:
        self._next = 1
        self._turns: dict[int, asyncio.Future[None]] = {}
        """Futures of the requests that have not begun, by number."""

    def in_turn(self, number: int, work: Coroutine[Any, Any, Result]) -> Coroutine[Any, Any, Result] | None:
        """Return `work`, which waits for its turn first. None: a request with this number came already; this is the
        client's retry. Raises `QueueFull`."""
        if number < self._next or number in self._turns:
            return None
        if len(self._turns) >= MAX_EARLY:
            raise QueueFull(f"{MAX_EARLY} requests of the model wait for request {self._next}: send that one")
        turn = self._turns[number] = asyncio.get_running_loop().create_future()
        self._release()
        return self._after(number, turn, work)

    async def _after(self, number: int, turn: asyncio.Future[None], work: Coroutine[Any, Any, Result]) -> Result:
        try:
            try:
                await turn
            finally:
                if self._turns.get(number) is turn and not turn.cancelled():  # it begins, before the next one wakes
                    del self._turns[number]
                    self._next += 1
                    self._release()
            return await work
        finally:
            work.close()  # it may not have begun

    def _release(self) -> None:
        """Let the next request begin, if it is there; those that were cancelled are left out."""
        while (turn := self._turns.get(self._next)) is not None:
            if not turn.cancelled():
                if not turn.done():
                    turn.set_result(None)
                break
            del self._turns[self._next]
            self._next += 1

    def end(self) -> None:
        """Fail the requests whose turn cannot come any more."""
        turns, self._turns = self._turns, {}
        for turn in turns.values():
            if not turn.done():
                turn.set_exception(SessionEnded("the model was unloaded"))
