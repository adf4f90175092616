"""The inference queue: requests that wait for the batch, and whose turn it is. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from coserve.errors import QueueFull
from coserve.link import Generate
from coserve.queues.fair import DeficitRoundRobin

RETRY_AT_LEAST, RETRY_AT_MOST = 1.0, 30.0
QUANTUM = 256
"""Tokens of prompt and answer that an adapter's turn is worth."""


@dataclass(frozen=True, slots=True)
class Queued:
    """A waiting request: when it came and when its first token is due, on the engine's clock."""

    message: Generate
    arrived: float
    deadline: float


class InferenceQueue:
    """Bounded, with removal by id. Ids are unique among the waiting.

    `fair`: adapters take turns by deficit round robin, the base without adapter being one of them, the versions of an
    adapter one together; a request costs what it may at most make the engine do, the tokens of its prompt and its
    `max_tokens`. Within an adapter, and for all requests if not `fair`: first come, first served.
    """

    def __init__(self, limit: int, *, fair: bool) -> None:
        assert limit >= 1, limit
        self._limit, self._fair = limit, fair
        self._entries: dict[str, Queued] = {}  # in order of arrival
        self._turns = DeficitRoundRobin[Queued](QUANTUM)
        self._waiting: tuple[Queued, ...] | None = ()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first_arrival(self) -> float | None:
        """When the request that waits longest came; None when nobody waits."""
        return next((entry.arrived for entry in self._entries.values()), None)

    def push(self, message: Generate, *, arrived: float, deadline: float) -> Queued | None:
        """Append a request. Returns the one that had to leave for it, if any.

        At the limit, the last request of the adapter with the most in line makes room for one with at least two fewer:
        nobody keeps others out by filling the queue.

        Raises `QueueFull` at the limit otherwise. Its `retry_after` is the age of the oldest request, within 1 to 30
        seconds: about as long as the way through this queue takes.
        """
        assert message.id not in self._entries, message.id
        displaced = self._make_room(message, arrived) if len(self._entries) >= self._limit else None
        entry = self._entries[message.id] = Queued(message, arrived, deadline)
        self._turns.push(self._flow(message), message.id, len(message.prompt) + message.sampling.max_tokens, entry)
        self._waiting = None
        return displaced

    def take(self, count: int) -> list[Queued]:
        """Remove and return the first `count` of `waiting`, fewer if fewer wait."""
        taken = self._turns.take(count)
        for entry in taken:
            del self._entries[entry.message.id]
        if taken:
            self._waiting = None
        return taken

    def cancel(self, id: str) -> bool:
        """Remove a request wherever it stands; False if it does not wait here."""
        entry = self._entries.pop(id, None)
        if entry is None:
            return False
        self._turns.remove(self._flow(entry.message), id)
        self._waiting = None
        return True

    def waiting(self) -> tuple[Queued, ...]:
        """All that wait, in the order in which they will be taken; the same tuple until something changes."""
        if self._waiting is None:
            self._waiting = self._turns.order()
        return self._waiting

    def retry_after(self, now: float) -> float:
        """Seconds after which one who was turned away may come again."""
        first = self.first_arrival
        return min(max(0.0 if first is None else now - first, RETRY_AT_LEAST), RETRY_AT_MOST)

    def _flow(self, message: Generate) -> Hashable:
        if not self._fair:
            return None
        return None if message.adapter is None else message.adapter.id

    def _make_room(self, message: Generate, now: float) -> Queued:
        flow, last = self._turns.longest()
        if self._turns.waiting(flow) < self._turns.waiting(self._flow(message)) + 2:
            raise QueueFull(
                f"the queue holds its {self._limit} requests; try again later", retry_after=self.retry_after(now)
            )
        displaced = self._entries[last]
        self.cancel(last)
        return displaced
