"""Adapters on their way from files to host memory, and the requests that were let in and wait for them.

Files are read on threads: the steps of other requests go on meanwhile. Everything else happens on the event loop. What
the machine cannot read now (`StorageError`) is tried again; whoever waits is told once that is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from coserve.adapter_store.interface import Adapters
from coserve.errors import AdapterNotFound
from coserve.queues.inference import Queued
from coserve.state.retries import Backoff, Retries
from coserve.types import AdapterRef

READERS = 2
"""Adapters that are read at once: more would share the same disk and the same interpreter."""


PATIENCE = Backoff(total=10.0)


class Fetches:
    """Keeps requests until their adapters were read, whatever came of that; then calls `changed`."""

    def __init__(
        self,
        adapters: Adapters,
        changed: Callable[[], None],
        *,
        backoff: Backoff = PATIENCE,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._adapters, self._changed = adapters, changed
        self._threads = ThreadPoolExecutor(READERS, "adapters")
        self._waiting: dict[str, Queued] = {}
        self._arrived: dict[str, Queued] = {}
        self._failed: dict[str, tuple[Queued, Exception]] = {}
        self._retries = Retries(backoff, sleep=sleep, changed=changed)
        self._reading: dict[AdapterRef, asyncio.Task[None]] = {}
        self._deleted: set[AdapterRef] = set()
        """Of those that are being read."""

    def __len__(self) -> int:
        """Requests that are here."""
        return len(self._waiting) + len(self._arrived) + len(self._failed)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Reads that are being tried again."""
        return self._retries.notes

    def take(self, request: Queued) -> bool:
        """Whether the request's adapter has to be read first; then it waits here."""
        ref, digests = request.message.adapter, request.message.digests
        if ref is not None and digests is not None:
            self._adapters.expect(ref, digests)
        if ref is None or not self._adapters.missing(ref):
            return False
        self._waiting[request.message.id] = request
        if ref not in self._reading:
            self._reading[ref] = asyncio.create_task(self._read(ref))
        return True

    def arrived(self) -> list[Queued]:
        """Remove and return the requests whose adapters are in memory.

        One that went again meanwhile, to make room for another, is read once more.
        """
        found, self._arrived = list(self._arrived.values()), {}
        return [request for request in found if not self.take(request)]

    def failed(self) -> list[tuple[Queued, Exception]]:
        """Remove and return the requests whose adapters could not be read, and what was raised."""
        found, self._failed = list(self._failed.values()), {}
        return found

    def cancel(self, id: str) -> bool:
        """Forget a request; False if it is not here."""
        return any(place.pop(id, None) is not None for place in (self._waiting, self._arrived, self._failed))

    def delete(self, ref: AdapterRef) -> None:
        """The adapter is no more: what is being read of it is not kept."""
        if ref in self._reading:
            self._deleted.add(ref)

    def close(self) -> None:
        """Nobody waits any more."""
        for place in (self._waiting, self._arrived, self._failed):
            place.clear()
        for task in self._reading.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, ref: AdapterRef) -> None:
        loop = asyncio.get_running_loop()
        failure: Exception | None = None
        try:
            keep = await self._retries.run(
                f"adapter {ref}", lambda: loop.run_in_executor(self._threads, self._adapters.read, ref)
            )
            if ref in self._deleted:
                failure = AdapterNotFound(f"no adapter {str(ref)!r}", field="adapter")
            else:
                keep()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is of those who wait for the adapter
            failure = error
        finally:
            del self._reading[ref]
            self._deleted.discard(ref)
            for id in [id for id, request in self._waiting.items() if request.message.adapter == ref]:
                request = self._waiting.pop(id)
                if failure is None:
                    self._arrived[id] = request
                else:
                    self._failed[id] = request, failure
            self._changed()
