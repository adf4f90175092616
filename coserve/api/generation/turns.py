"""Bounds the work per event-loop iteration, however many tasks are ready."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Limits the work that begins in one iteration of the running event loop to `limit` units, first come, first
    served."""

    def __init__(self, limit: int) -> None:
        assert limit > 0, f"expected a limit above 0, got {limit}"
        self._limit = self._left = limit
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._renewing = False

    async def acquire(self, units: int) -> None:
        """Wait for an iteration with units left. The last work that begins in one may exceed its limit."""
        if self._left > 0 and not self._waiting:
            self._spend(units)
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((future, units))
        await future

    def _spend(self, units: int) -> None:
        self._left -= units
        if not self._renewing:
            self._renewing = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """Begin the next iteration; waiting tasks are served first."""
        self._left, self._renewing = self._limit, False
        while self._waiting and self._left > 0:
            future, units = self._waiting.popleft()
            if not future.done():  # otherwise its task was cancelled
                future.set_result(None)
                self._spend(units)
