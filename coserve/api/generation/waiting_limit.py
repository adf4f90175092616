"""How many sequences may wait for their first token, in the API process and the engine together."""

from __future__ import annotations

from collections import Counter

from coserve.errors import InvalidRequest, QueueFull


class WaitingLimit:
    """At most `limit` sequences wait. If `fair`, one adapter cannot keep others out: each adapter may have its share (the
    limit divided by the number of waiting adapters) beyond the limit; the engine's queue then displaces another's request."""

    def __init__(self, limit: int, *, fair: bool) -> None:
        self._limit, self._fair = limit, fair
        self._counts = Counter[str | None]()

    def acquire(self, adapter: str | None, count: int) -> None:
        """Raises `QueueFull`, and `InvalidRequest` for more than there are ever places for. `adapter`: its id; None: the base."""
        if count > self._limit:
            raise InvalidRequest(f"expected at most {self._limit}, the daemon's max_queue, got {count}", field="n")
        total, own = self._counts.total(), self._counts[adapter]
        flows = len({adapter, *self._counts})
        if total + count > self._limit and not (self._fair and own + count <= self._limit // flows):
            raise QueueFull(f"{total} requests wait already; the queue takes {self._limit}")
        self._counts[adapter] += count

    def release(self, adapter: str | None, count: int) -> None:
        self._counts[adapter] -= count
        if not self._counts[adapter]:
            del self._counts[adapter]
