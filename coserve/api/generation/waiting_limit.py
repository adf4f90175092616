"""Limits of requests in flight: the sequences that wait for their first token, in the API process and the engine
together, and the work per event-loop iteration."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from coserve.core.errors import InvalidRequest, QueueFull


class WaitingLimit:
    """Lets at most `limit` sequences wait. If `fair`, two kinds of requests may exceed the limit, and the engine's
    queue then displaces another request for each. An adapter may have up to its fair number waiting: the limit divided
    by the number of waiting adapters. Requests of other classes may exceed it by the number of waiting sequences of the
    class batch."""

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


class IterationBudget:
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
