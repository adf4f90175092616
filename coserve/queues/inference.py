"""The inference queue: requests that wait to join the batch. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from itertools import islice
from sys import maxsize

from coserve.core.errors import QueueFull
from coserve.queues.fair import DeficitRoundRobin
from coserve.queues.request import Request

RETRY_AT_LEAST, RETRY_AT_MOST = 1.0, 30.0
"""Bounds of `Retry-After` in seconds."""
QUANTUM = 256
"""Tokens of prompt and output that an adapter may use in one turn."""
INTERACTIVE_PER_BATCH = 4
"""Interactive requests that pass before a batch-class request may, while both classes wait."""


class InferenceQueue:
    """Bounded queue of requests with unique ids.

    `fair`: adapters take turns by deficit round robin, within each class. The base without an adapter is one flow, all
    versions of an adapter are one flow, and a request costs its prompt tokens plus `max_tokens`. Interactive requests
    go before the batch class. After `INTERACTIVE_PER_BATCH` of them, a batch-class request goes if its first token is
    due before the next interactive one's. Requests of one adapter and class, and all requests if not `fair`, are served
    in order of arrival.
    """

    def __init__(self, limit: int, *, fair: bool) -> None:
        assert limit >= 1, limit
        self._limit, self._fair = limit, fair
        self._entries: dict[str, Request] = {}  # in order of arrival
        self._interactive, self._batch = DeficitRoundRobin[Request](QUANTUM), DeficitRoundRobin[Request](QUANTUM)
        self._since_batch = 0
        """Interactive requests admitted since the last batch-class one."""
        self._waiting: tuple[tuple[int, int], tuple[Request, ...]] | None = None
        """Cached `waiting(count, batch)`, with its arguments."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first_arrival(self) -> float | None:
        """Arrival time of the oldest request; None if the queue is empty."""
        return next((entry.arrived for entry in self._entries.values()), None)

    @property
    def batch_waits(self) -> bool:
        """Whether requests of the batch class wait."""
        return len(self._batch) > 0

    def push(self, request: Request) -> Request | None:
        """Append a request. If the queue is full, return the request to displace: the caller cancels it, or the new
        one.

        An interactive request displaces a batch-class one. Otherwise the newest request of the adapter with the most
        requests of the same class is displaced, if the new request's adapter has at least two fewer: one adapter cannot
        keep others out by filling the queue. A call of several choices, one of which was admitted, is never displaced:
        an older request is, or one of the adapter with the next most requests.

        Raises:
            QueueFull: the queue is full, and no request can be displaced. Carries `retry_after`.
        """
        assert request.id not in self._entries, request.id
        displaced = self._displaced(request) if len(self._entries) >= self._limit else None
        self._entries[request.id] = request
        cost = request.pending + request.sampling.max_tokens
        self._flows(request).push(self._flow(request), request.id, cost, request)
        self._waiting = None
        return displaced

    def pop(self, count: int, batch: int = maxsize) -> list[Request]:
        """Remove and return the requests that `waiting` returns for the same arguments."""
        popped = self.waiting(count, batch)
        taken = 0
        for entry in popped:
            del self._entries[entry.id]
            of_batch = self._is_batch(entry)
            taken += of_batch
            self._since_batch = 0 if of_batch else self._since_batch + 1
        self._interactive.pop(len(popped) - taken)
        self._batch.pop(taken)
        if popped:
            self._waiting = None
        return list(popped)

    def cancel(self, ids: Collection[str]) -> set[str]:
        """Remove those of these requests that are queued, and return their ids. One call for many costs little more
        than for one."""
        gone = [entry for id in ids if (entry := self._entries.pop(id, None)) is not None]
        for flows in self._interactive, self._batch:
            by_flow: dict[Hashable, list[str]] = {}
            for entry in gone:
                if self._flows(entry) is flows:
                    by_flow.setdefault(self._flow(entry), []).append(entry.id)
            if by_flow:
                flows.remove(by_flow)
        if gone:
            self._waiting = None
        return {entry.id for entry in gone}

    def waiting(self, count: int, batch: int = maxsize) -> tuple[Request, ...]:
        """The first `count` requests, at most `batch` of them of the batch class, which `pop` would return. The same
        tuple for the same arguments until the queue changes."""
        if self._waiting is None or self._waiting[0] != (count, batch):
            self._waiting = (count, batch), self._first(count, batch)
        return self._waiting[1]

    def ahead(self, newest: Request, without: Collection[str] = ()) -> int:
        """Number of queued requests, excluding `without`, that will be admitted before `newest`, the newest of its
        flow."""
        if not without and not (len(self._interactive) and len(self._batch)):
            return self._flows(newest).before_last(self._flow(newest))
        number = next(number for number, entry in enumerate(self._merged()) if entry is newest)
        leaving = islice(self._merged(), number) if without else ()
        return number - sum(entry.id in without for entry in leaving)

    def _first(self, count: int, batch: int) -> tuple[Request, ...]:
        if not (len(self._interactive) and len(self._batch)):
            return self._interactive.first(count) or self._batch.first(min(count, batch))
        return tuple(islice(self._merged(batch), count))

    def _merged(self, most: int = maxsize) -> Iterator[Request]:
        """All requests in order of admission, both classes merged; at most `most` of the batch class."""
        batch, since = islice(self._batch, most), self._since_batch
        due = next(batch, None)
        for entry in self._interactive:
            if due is not None and since >= INTERACTIVE_PER_BATCH and due.deadline < entry.deadline:
                yield due
                due, since = next(batch, None), 0
            yield entry
            since += 1
        if due is not None:
            yield due
        yield from batch

    def _is_batch(self, request: Request) -> bool:
        return self._fair and request.message.slo.batch

    def _flows(self, request: Request) -> DeficitRoundRobin[Request]:
        return self._batch if self._is_batch(request) else self._interactive

    def retry_after(self, now: float) -> float:
        """Seconds after which a refused client may retry: the age of the oldest request, which is about the time a
        request spends in the queue."""
        first = self.first_arrival
        return min(max(0.0 if first is None else now - first, RETRY_AT_LEAST), RETRY_AT_MOST)

    def _flow(self, request: Request) -> Hashable:
        return None if request.adapter is None or not self._fair else request.adapter.id

    def _displaced(self, request: Request) -> Request:
        own = self._flows(request)
        for flows in (self._batch,) if own is self._batch else (self._batch, own):
            fewest = own.waiting(self._flow(request)) + 2 if flows is own else 0
            if (found := self._newest_of_the_longest(flows, fewest)) is not None:
                return found
        why = f"the queue holds its {self._limit} requests; try again later"
        raise QueueFull(why, retry_after=self.retry_after(request.arrived))

    def _newest_of_the_longest(self, flows: DeficitRoundRobin[Request], fewest: int) -> Request | None:
        """The newest displaceable request of the longest flow with at least `fewest`; skips calls partly admitted."""
        begun = set[str]()
        """Sequences of partly admitted calls. The last sequence of a call is the newest, and lists the others."""
        for flow, id in flows.longest_first():
            if flows.waiting(flow) < fewest:
                break
            choices = self._entries[id].message.choices
            if id not in begun and all(other in self._entries for other in choices):
                return self._entries[id]
            begun.update(choices)
        return None
