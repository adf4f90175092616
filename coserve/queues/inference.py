"""The inference queue: requests that wait to join the batch. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from coserve.errors import QueueFull
from coserve.link import Generate
from coserve.queues.fair import DeficitRoundRobin

RETRY_AT_LEAST, RETRY_AT_MOST = 1.0, 30.0
"""Bounds of `Retry-After` in seconds."""
QUANTUM = 256
"""Tokens of prompt and output that an adapter may use in one turn."""


@dataclass(frozen=True, slots=True)
class Queued:
    """A waiting request. `arrived`, and the `deadline` of its first token, are seconds on the engine's clock."""

    message: Generate
    arrived: float
    deadline: float
    tokens: int = field(init=False)
    """Of the prompt."""
    decodes: int = field(init=False)
    """Most decode steps after the first token."""
    end: float = field(init=False)
    """Deadline of the last token; infinite without one."""

    def __post_init__(self) -> None:
        message, e2e = self.message, self.message.slo.e2e
        object.__setattr__(self, "tokens", len(message.prompt))
        object.__setattr__(self, "decodes", max(0, message.sampling.max_tokens - 1))
        object.__setattr__(self, "end", math.inf if e2e is None else self.arrived + e2e)


class InferenceQueue:
    """At most `limit` requests with unique ids.

    `fair`: adapters take turns by deficit round robin. The base without an adapter is one flow, all versions of an adapter
    are one flow, and a request costs its prompt tokens plus `max_tokens`. Requests of one adapter, and all requests if not
    `fair`, are served in order of arrival.
    """

    def __init__(self, limit: int, *, fair: bool) -> None:
        assert limit >= 1, limit
        self._limit, self._fair = limit, fair
        self._entries: dict[str, Queued] = {}  # in order of arrival
        self._flows = DeficitRoundRobin[Queued](QUANTUM)
        self._waiting: tuple[int, tuple[Queued, ...]] | None = None
        """The last answer of `waiting`, and its `count`."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first_arrival(self) -> float | None:
        """Arrival time of the oldest request; None if the queue is empty."""
        return next((entry.arrived for entry in self._entries.values()), None)

    def push(self, message: Generate, *, arrived: float, deadline: float) -> Queued | None:
        """Append a request. Returns the request that was displaced, if any.

        In a full queue, the newest request of the adapter with the most requests is displaced if the new request's adapter
        has at least two fewer: one adapter cannot keep others out by filling the queue.

        Raises:
            QueueFull: the queue is full, and no request was displaced. `retry_after`: see `retry_after`.
        """
        assert message.id not in self._entries, message.id
        displaced = self._displace(message, arrived) if len(self._entries) >= self._limit else None
        entry = self._entries[message.id] = Queued(message, arrived, deadline)
        self._flows.push(self._flow(message), message.id, entry.tokens + message.sampling.max_tokens, entry)
        self._waiting = None
        return displaced

    def pop(self, count: int) -> list[Queued]:
        """Remove and return the first `count` requests of `waiting`, or all if fewer wait."""
        popped = self._flows.pop(count)
        for entry in popped:
            del self._entries[entry.message.id]
        if popped:
            self._waiting = None
        return popped

    def cancel(self, id: str) -> bool:
        """Remove a request. False if it is not in the queue."""
        entry = self._entries.pop(id, None)
        if entry is None:
            return False
        self._flows.remove(self._flow(entry.message), id)
        self._waiting = None
        return True

    def waiting(self, count: int) -> tuple[Queued, ...]:
        """The requests that `pop` would return. The same tuple for the same `count` until the queue changes."""
        if self._waiting is None or self._waiting[0] != count:
            self._waiting = count, self._flows.first(count)
        return self._waiting[1]

    def retry_after(self, now: float) -> float:
        """Seconds after which a refused client may try again: the age of the oldest request, which is about the time that a
        request spends in the queue."""
        first = self.first_arrival
        return min(max(0.0 if first is None else now - first, RETRY_AT_LEAST), RETRY_AT_MOST)

    def _flow(self, message: Generate) -> Hashable:
        if not self._fair:
            return None
        return None if message.adapter is None else message.adapter.id

    def _displace(self, message: Generate, now: float) -> Queued:
        flow, last = self._flows.longest()
        if self._flows.waiting(flow) < self._flows.waiting(self._flow(message)) + 2:
            raise QueueFull(
                f"the queue holds its {self._limit} requests; try again later", retry_after=self.retry_after(now)
            )
        displaced = self._entries[last]
        self.cancel(last)
        return displaced
