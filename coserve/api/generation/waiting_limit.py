"""Limits the sequences that wait for their first token, in the API process and the engine together."""

from __future__ import annotations

from collections import Counter

from coserve.core.errors import InvalidRequest, QueueFull


class WaitingLimit:
    """Lets at most `limit` sequences wait. If `fair`, two kinds of requests may exceed the limit, and the engine's
    queue then displaces another request for each. An adapter may have up to its fair number waiting: the limit divided
    by the number of waiting adapters. Requests of other classes may replace as many as wait of the class batch."""

    def __init__(self, limit: int, *, fair: bool) -> None:
        self._limit, self._fair = limit, fair
        self._counts = Counter[str | None]()
        self._batch = 0

    def acquire(self, adapter: str | None, count: int, *, batch: bool = False) -> None:
        """Count `count` more waiting sequences. Raises `QueueFull`, and `InvalidRequest` for more than `limit` at once.
        `adapter`: its id; None: the base. `batch`: whether the request's class is batch."""
        if count > self._limit:
            raise InvalidRequest(f"expected at most {self._limit}, the daemon's max_queue, got {count}", field="n")
        total, own = self._counts.total(), self._counts[adapter]
        flows = len({adapter, *self._counts})
        share = 0 if not self._fair else self._limit // flows - own
        others = self._limit - total + (self._batch if self._fair and not batch else 0)
        if count > max(share, others):
            raise QueueFull(f"{total} requests wait already; the queue takes {self._limit}")
        self._counts[adapter] += count
        self._batch += count * batch

    def release(self, adapter: str | None, count: int, *, batch: bool = False) -> None:
        self._counts[adapter] -= count
        self._batch -= count * batch
        if not self._counts[adapter]:
            del self._counts[adapter]
