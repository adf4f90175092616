"""Work of requests that is cut short when the daemon stops, so that a stop does not take as long as they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coserve.core.errors import EngineUnavailable


class Stopping:
    """Uploads that arrive, and corpora that are being tokenised."""

    def __init__(self) -> None:
        self._error: EngineUnavailable | None = None
        self._limits: set[asyncio.Timeout] = set()
        """Of the blocks that run."""

    def stop(self, error: EngineUnavailable) -> None:
        """Every block that runs, and every later one, ends with `error`."""
        self._error = error
        limits, self._limits = self._limits, set()
        for limit in limits:
            limit.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def interrupts(self) -> AsyncIterator[None]:
        """The block is cancelled when the daemon stops, and the error of the stop raised in its place."""
        if self._error is not None:
            raise self._error
        try:
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if self._error is None or not limit.expired():
                raise
            raise self._error from None
