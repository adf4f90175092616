"""The inference queue: requests that wait for the batch, first come first. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from coserve.errors import QueueFull
from coserve.link import Generate

RETRY_AT_LEAST, RETRY_AT_MOST = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class Queued:
    """A waiting request: when it came and when its first token is due, on the engine's clock."""

    message: Generate
    arrived: float
    deadline: float


class InferenceQueue:
    """A bounded FIFO with removal by id. Ids are unique among the waiting."""

    def __init__(self, limit: int) -> None:
        assert limit >= 1, limit
        self._limit = limit
        self._entries: dict[str, Queued] = {}  # a dict keeps the order of insertion and removes by key

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first_arrival(self) -> float | None:
        """When the request that waits longest came; None when nobody waits."""
        return next((entry.arrived for entry in self._entries.values()), None)

    def push(self, message: Generate, *, arrived: float, deadline: float) -> None:
        """Append a request.

        Raises `QueueFull` at the limit. Its `retry_after` is the age of the oldest request, within 1 to 30 seconds: about
        as long as the way through this queue takes.
        """
        assert message.id not in self._entries, message.id
        first = self.first_arrival
        if len(self._entries) >= self._limit and first is not None:
            retry_after = min(max(arrived - first, RETRY_AT_LEAST), RETRY_AT_MOST)
            raise QueueFull(f"the queue holds its {self._limit} requests; try again later", retry_after=retry_after)
        self._entries[message.id] = Queued(message, arrived, deadline)

    def take(self, count: int) -> list[Queued]:
        """Remove and return the first `count` requests, fewer if fewer wait."""
        taken = list(self._entries.values())[:count]
        for entry in taken:
            del self._entries[entry.message.id]
        return taken

    def cancel(self, id: str) -> bool:
        """Remove a request wherever it stands; False if it does not wait here."""
        return self._entries.pop(id, None) is not None

    def waiting(self) -> tuple[Queued, ...]:
        """All that wait, first come first."""
        return tuple(self._entries.values())
