"""Aborts long work of requests when the daemon stops, so that the stop does not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeVar

from coserve.core.errors import EngineUnavailable

T = TypeVar("T")


class Stopping:
    """Aborts uploads that are arriving, and corpora that are being tokenised."""

    def __init__(self) -> None:
        self.error: EngineUnavailable | None = None
        """Why the daemon stops; None: it does not."""
        self._limits: set[asyncio.Timeout] = set()
        """Timeouts of the running blocks."""

    def stop(self, error: EngineUnavailable) -> None:
        """End every running block, and every later one, with `error`."""
        self.error = error
        limits, self._limits = self._limits, set()
        for limit in limits:
            limit.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def interrupts(self) -> AsyncIterator[None]:
        """Cancel the block when the daemon stops, and raise the stop's error instead."""
        if self.error is not None:
            raise self.error
        try:
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if self.error is None or not limit.expired():
                raise
            raise self.error from None

    @asynccontextmanager
    async def read(self, body: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """Read a large body; reading is aborted when the daemon stops, and what follows it is not."""
        async with AsyncExitStack() as stack:
            async with self.interrupts():
                read = await stack.enter_async_context(body)
            yield read
