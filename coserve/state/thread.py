"""The registry for the event loop: one thread runs all calls in order on its connection, a second thread only reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from contextvars import copy_context
from typing import TypeVar

from coserve.core.errors import StartupError, StorageBusy, StorageFull
from coserve.state.registry.database import database_errors
from coserve.state.registry.registry import Registry
from coserve.state.reserve import Reserve
from coserve.state.retries import Backoff, Retries

T = TypeVar("T")

LOCK_BACKOFF = Backoff(total=5.0)


class RegistryThread:
    """Runs functions on the registry off the event loop: `await thread(lambda registry: registry.job(id))`.

    Calls run one at a time, in order. `await thread.read(...)` runs concurrently, on its own connection: a commit may
    wait for the disk while a checkpoint is written, and a request that only looks up its adapter need not wait for it.

    A call is completed even if its caller is cancelled. A call that meets another process's lock is retried by
    `backoff`, while other calls run, and then raises `StorageBusy`. So `fn` must be safe to repeat: only its last
    transaction is rolled back. The first call opens the registry, and raises what `Registry` raises.
    """

    def __init__(
        self,
        registry_factory: Callable[[], Registry],
        *,
        backoff: Backoff = LOCK_BACKOFF,
        reserve: Reserve | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`reserve`: disk space for `with_reserve`."""
        self._factory, self._reserve = registry_factory, reserve
        self._registry: Registry | None = None
        self._reader: Registry | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="registry")
        self._readers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="registry-reader")
        self._retries = Retries(backoff, errors=StorageBusy, sleep=sleep)

    @property
    def notes(self) -> tuple[str, ...]:
        """Retries and problems of the reserve; for /health."""
        return self._retries.notes + (() if self._reserve is None else self._reserve.notes)

    async def __call__(self, fn: Callable[[Registry], T]) -> T:
        return await self._run(self._call, fn, self._executor)

    async def read(self, fn: Callable[[Registry], T]) -> T:
        """Run an `fn` that changes nothing; it sees what was committed before. Once the registry is open, it
        waits only for earlier reads."""
        if self._registry is None:
            await self(lambda _: None)  # the first call creates the file
        return await self._run(self._call_reader, fn, self._readers)

    async def with_reserve(self, fn: Callable[[Registry], T]) -> T:
        """Run a change that frees space or ends a job: on a full disk, `fn` is retried with the reserved
        space."""
        return await self._run(self._call_with_reserve, fn, self._executor)

    async def _run(
        self, call: Callable[[Callable[[Registry], T]], T], fn: Callable[[Registry], T], executor: ThreadPoolExecutor
    ) -> T:
        loop, context = asyncio.get_running_loop(), copy_context()  # with the request's principal
        return await self._retries.run("registry", lambda: loop.run_in_executor(executor, context.run, call, fn))

    def _call(self, fn: Callable[[Registry], T]) -> T:
        with database_errors():
            return fn(self._opened())

    def _call_reader(self, fn: Callable[[Registry], T]) -> T:
        with database_errors():
            if self._reader is None:
                self._reader = self._opened_reader()
            return fn(self._reader)

    def _opened_reader(self) -> Registry:
        try:
            reader = self._factory()
        except StartupError as error:  # the first connection found it valid: it only cannot be opened now
            raise error.__cause__ or error from None
        reader.refuse_changes()
        return reader

    def _call_with_reserve(self, fn: Callable[[Registry], T]) -> T:
        try:
            return self._call(fn)
        except StorageFull:
            if self._reserve is None or self._registry is None:
                raise
            with self._reserve.released(), database_errors():
                return fn(self._registry)

    def _opened(self) -> Registry:
        if self._registry is None:  # opening it makes SQLite create two more files
            with nullcontext() if self._reserve is None else self._reserve.released():
                self._registry = self._factory()
        elif self._reserve is not None:
            self._reserve.refill()  # allocate again what was used, or did not fit
        return self._registry

    def _close(self, reader_closed: Future[None]) -> None:
        wait([reader_closed])  # the last connection to close empties the log
        if self._registry is not None:
            self._registry.close()

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()

    async def close(self) -> None:
        """Finish all queued calls, close the file, end the threads. A second call does nothing."""
        try:
            reader_closed = self._readers.submit(self._close_reader)
        except RuntimeError:  # it was already shut down
            return
        closed = self._executor.submit(self._close, reader_closed)
        for executor in (self._readers, self._executor):
            executor.shutdown(wait=False)
        # Shielded: cancelling the caller would drop calls that have not begun.
        await asyncio.shield(asyncio.gather(*map(asyncio.wrap_future, (reader_closed, closed))))
