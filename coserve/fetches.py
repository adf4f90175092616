"""Adapters on their way from files to host memory, and the requests that were let in and wait for them.

Files are read on threads: the steps of other requests go on meanwhile. Everything else happens on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from coserve.errors import CoserveError
from coserve.queues.inference import Queued
from coserve.rooms import Adapters
from coserve.types import AdapterRef

READERS = 2
"""Adapters that are read at once: more would share the same disk and the same interpreter."""


class Fetches:
    """Keeps requests until their adapters were read, whatever came of that; then calls `changed`."""

    def __init__(self, adapters: Adapters, changed: Callable[[], None]) -> None:
        self._adapters, self._changed = adapters, changed
        self._threads = ThreadPoolExecutor(READERS, "adapters")
        self._waiting: dict[str, Queued] = {}
        self._arrived: dict[str, Queued] = {}
        self._reading: dict[AdapterRef, asyncio.Task[None]] = {}
        self._deleted: set[AdapterRef] = set()
        """Of those that are being read."""

    def __len__(self) -> int:
        """Requests that are here."""
        return len(self._waiting) + len(self._arrived)

    def take(self, request: Queued) -> bool:
        """Whether the request's adapter has to be read first; then it waits here."""
        ref = request.message.adapter
        if ref is None or not self._adapters.missing(ref):
            return False
        self._waiting[request.message.id] = request
        if ref not in self._reading:
            self._reading[ref] = asyncio.create_task(self._read(ref))
        return True

    def arrived(self) -> list[Queued]:
        """Remove and return the requests that need not wait any more."""
        found, self._arrived = list(self._arrived.values()), {}
        return found

    def cancel(self, id: str) -> bool:
        """Forget a request; False if it is not here."""
        return self._waiting.pop(id, None) is not None or self._arrived.pop(id, None) is not None

    def delete(self, ref: AdapterRef) -> None:
        """The adapter is no more: what is being read of it is not kept."""
        if ref in self._reading:
            self._deleted.add(ref)

    def close(self) -> None:
        """Nobody waits any more."""
        self._waiting.clear()
        for task in self._reading.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, ref: AdapterRef) -> None:
        try:
            keep = await asyncio.get_running_loop().run_in_executor(self._threads, self._adapters.read, ref)
            if ref not in self._deleted:
                keep()
        except CoserveError:
            pass  # the request meets it when it asks for the adapter, and is told
        finally:
            del self._reading[ref]
            self._deleted.discard(ref)
            for id in [id for id, request in self._waiting.items() if request.message.adapter == ref]:
                self._arrived[id] = self._waiting.pop(id)
            self._changed()
