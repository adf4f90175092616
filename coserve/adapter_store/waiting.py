"""The requests that wait for their adapters to be read, and those whose adapters could not be read."""

from __future__ import annotations

from coserve.adapter_store.entry import Entry
from coserve.queues.inference import Queued


class WaitingRequests:
    """In the order in which they came. A waiting request keeps its adapter from being evicted (`Entry.waiting`)."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Queued, Entry]] = {}
        self._failed: dict[str, tuple[Queued, Exception]] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._failed)

    def add(self, request: Queued, entry: Entry) -> None:
        self._waiting[request.message.id] = request, entry
        entry.waiting += 1

    def pop_arrived(self) -> Queued | None:
        """Remove and return the first request whose adapter is in memory; None if there is none."""
        for request, entry in self._waiting.values():
            if entry.state.in_memory:
                self._remove(request.message.id)
                return request
        return None

    def pop_failed(self) -> list[tuple[Queued, Exception]]:
        """Remove and return the requests whose adapters could not be read, and what was raised."""
        found, self._failed = list(self._failed.values()), {}
        return found

    def fail(self, entry: Entry, error: Exception) -> None:
        """None of the requests for this adapter gets it."""
        for request, own in [*self._waiting.values()]:
            if own is entry:
                self._remove(request.message.id)
                self._failed[request.message.id] = request, error

    def cancel(self, id: str) -> Entry | None:
        """Forget a request. Its adapter if it waited for one."""
        self._failed.pop(id, None)
        return self._remove(id) if id in self._waiting else None

    def __contains__(self, id: str) -> bool:
        return id in self._waiting or id in self._failed

    def clear(self) -> None:
        self._waiting.clear()
        self._failed.clear()

    def _remove(self, id: str) -> Entry:
        _, entry = self._waiting.pop(id)
        entry.waiting -= 1
        return entry
