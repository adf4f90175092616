"""Deletes adapters whose time to live is over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from coserve.core.errors import AdapterBusy, AdapterNotFound, StorageError
from coserve.core.schemas.adapters import DeletedAdapter
from coserve.state.registry.registry import Registry
from coserve.state.thread import RegistryThread

log = logging.getLogger(__name__)

AGAIN = 30.0
"""Seconds until the deletion of an adapter in use is retried."""
LONGEST = 3600.0
"""Longest sleep in seconds: the system clock may be set meanwhile."""


class Expiry:
    """Waits for the next end of a time to live, then calls `delete` with the name and the time."""

    def __init__(
        self,
        registry: RegistryThread,
        delete: Callable[[str, float], Awaitable[DeletedAdapter]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry, self._delete, self._clock = registry, delete, clock
        self._changed, self._task = asyncio.Event(), asyncio.create_task(self._run())

    def changed(self) -> None:
        """Look again: a time to live was set."""
        self._changed.set()

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                found = await self._registry.read(lambda registry: registry.next_expiry())
                left = LONGEST if found is None else found[1] - self._clock()
                if found is not None and left <= 0:
                    await self._expire(*found)
                    continue
            except StorageError:
                left = AGAIN
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, LONGEST))

    async def _expire(self, name: str, at: float) -> None:
        try:
            if (await self._delete(name, at)).versions:
                log.info("adapter %s was deleted: its time to live is over", name)
        except AdapterNotFound:
            await self._put_off(name, at, None)
        except AdapterBusy as error:
            log.info("adapter %s stays for now, though its time to live is over: %s", name, error)
            await self._put_off(name, at, self._clock() + AGAIN)

    async def _put_off(self, name: str, at: float, later: float | None) -> None:
        """Set the end of a time to live, unless it was changed meanwhile."""

        def change(registry: Registry) -> None:
            if (labels := registry.labels(name)).expires_at == at:
                registry.set_labels(name, msgspec.structs.replace(labels, expires_at=later))

        await self._registry(change)
