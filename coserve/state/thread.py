"""The registry for the event loop: one thread runs all calls in order on its connection, a second thread only reads.
And disk space reserved for writes that must succeed on a full disk: deletions and the ends of jobs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from pathlib import Path
from typing import TypeVar

from coserve.core.errors import StartupError, StorageBusy, StorageFull
from coserve.state.durable import FULL
from coserve.state.registry.database import database_errors
from coserve.state.registry.registry import Registry
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


log = logging.getLogger(__name__)

SIZE = 4 << 20
"""Bytes. SQLite's log grows by a few pages of 4 KiB with each commit, and is reset every 1000 pages."""
BLOCK = 64 << 10
"""The file's size is a multiple of this many bytes."""


class Reserve:
    """A file of `size` allocated bytes. Not thread-safe.

    Disk errors other than a lack of space are not raised, since the reserve only helps other writes. They are logged
    once and shown in `notes` until the reserve works again.
    """

    def __init__(self, path: Path, size: int = SIZE) -> None:
        self._path, self._size = path, size
        self._held = 0
        self._problem: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Why no space is reserved, if the disk refuses it; for /health. May be read on any thread."""
        problem = self._problem
        return () if problem is None else (f"no space is kept back for a full disk: {problem}",)

    def refill(self) -> None:
        """Allocate as much of the file as the disk allows."""
        if self._held >= self._size:
            return
        try:
            self._grow()
        except OSError as error:
            self._report(error.strerror or str(error))
        else:
            self._report(None)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Free the space inside the block; allocate it again afterwards, as far as possible."""
        self._held = 0
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:  # the block may still succeed without the space
            self._report(error.strerror or str(error))
        try:
            yield
        finally:
            self.refill()

    def _grow(self) -> None:
        disk = os.statvfs(self._path.parent)
        wanted = min(self._size, self._held + disk.f_bavail * disk.f_frsize // BLOCK * BLOCK)
        while wanted > self._held:
            try:
                self._allocate(wanted)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                wanted -= BLOCK  # another file took the space, or metadata of this one needs some of it

    def _allocate(self, size: int) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
        self._held = size

    def _report(self, problem: str | None) -> None:
        if problem == self._problem:
            return
        if problem is None:
            log.info("space is kept back for a full disk again")
        elif self._problem is None:
            log.warning("no space is kept back for a full disk: %s; tried again with each change", problem)
        self._problem = problem
