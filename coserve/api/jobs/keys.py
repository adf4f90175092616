"""Serialises requests with the same `Idempotency-Key`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from coserve.core.errors import QueueFull


class IdempotencyKeys:
    """Locks by `Idempotency-Key`. If a client repeats a request while its first one is still handled, the second waits,
    and then finds the first one's job. If the first one failed or its client has left, the second is handled itself."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds that a request waits for the one before it."""
        self._patience = patience
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks that a request holds or waits for."""

    @asynccontextmanager
    async def alone(self, key: str | None) -> AsyncIterator[None]:
        """Hold the key's lock inside the block; no lock without a key. Raises `QueueFull` after `patience` seconds."""
        if key is None:
            yield
            return
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with asyncio.timeout(self._patience):
                await lock.acquire()
        except TimeoutError:
            why = f"a request with the Idempotency-Key {key!r} is being handled; try again later"
            raise QueueFull(why, retry_after=10) from None
        try:
            yield
        finally:
            lock.release()
