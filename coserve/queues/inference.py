"""The inference queue: requests that wait to join the batch. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from coserve.errors import QueueFull
from coserve.link import Generate
from coserve.queues.fair import DeficitRoundRobin

RETRY_AT_LEAST, RETRY_AT_MOST = 1.0, 30.0
"""Bounds of `Retry-After` in seconds."""
QUANTUM = 256
"""Tokens of prompt and output that an adapter may use in one turn."""
INTERACTIVE_PER_BATCH = 4
"""Fewest interactive requests between two of the class batch, while both wait."""


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


Line = tuple[bool, Hashable]
"""Requests that are served in order of arrival: the class, batch or not, and the adapter."""


class InferenceQueue:
    """At most `limit` requests with unique ids.

    `fair`: adapters take turns by deficit round robin, in each class. The base without an adapter is one flow, all versions of an
    adapter are one flow, and a request costs its prompt tokens plus `max_tokens`. Interactive requests go before the class batch; after `INTERACTIVE_PER_BATCH`
    of them goes one of the class batch whose first token is due before theirs. Requests of one adapter and class, and all requests
    if not `fair`, are served in order of arrival.
    """

    def __init__(self, limit: int, *, fair: bool) -> None:
        assert limit >= 1, limit
        self._limit, self._fair = limit, fair
        self._entries: dict[str, Queued] = {}  # in order of arrival
        self._interactive, self._batch = DeficitRoundRobin[Queued](QUANTUM), DeficitRoundRobin[Queued](QUANTUM)
        self._since_batch = 0
        """Interactive requests that were admitted since the last one of the class batch."""
        self._waiting: tuple[int, tuple[Queued, ...]] | None = None
        """The last answer of `waiting`, and its `count`."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first_arrival(self) -> float | None:
        """Arrival time of the oldest request; None if the queue is empty."""
        return next((entry.arrived for entry in self._entries.values()), None)

    def push(self, message: Generate, *, arrived: float, deadline: float) -> Queued | None:
        """Append a request. In a full queue, returns the request that is to go for it: the caller cancels that one, or the new one.

        In a full queue, an interactive request displaces one of the class batch. Else the newest request of the adapter with the
        most requests of the same class is displaced, if the new request's adapter has at least two fewer: one adapter cannot
        keep others out by filling the queue. A request whose other choices have begun does not go: an older one does, or one of the next adapter.

        Raises:
            QueueFull: the queue is full, and no request gives way. `retry_after`: see `retry_after`.
        """
        assert message.id not in self._entries, message.id
        displaced = self._displaced(message, arrived) if len(self._entries) >= self._limit else None
        entry = self._entries[message.id] = Queued(message, arrived, deadline)
        cost = entry.tokens + message.sampling.max_tokens
        self._flows(message).push(self._flow(message), message.id, cost, entry)
        self._waiting = None
        return displaced

    def pop(self, count: int) -> list[Queued]:
        """Remove and return the first `count` requests of `waiting`, or all if fewer wait."""
        popped = self.waiting(count)
        batch = 0
        for entry in popped:
            del self._entries[entry.message.id]
            of_batch = self._is_batch(entry.message)
            batch += of_batch
            self._since_batch = 0 if of_batch else self._since_batch + 1
        self._interactive.pop(len(popped) - batch)
        self._batch.pop(batch)
        if popped:
            self._waiting = None
        return list(popped)

    def cancel(self, ids: Collection[str]) -> set[str]:
        """Remove those of these requests that are in the queue, and return their ids. Takes little longer for many than for one."""
        gone = [entry for id in ids if (entry := self._entries.pop(id, None)) is not None]
        for flows in self._interactive, self._batch:
            by_flow: dict[Hashable, list[str]] = {}
            for entry in gone:
                if self._flows(entry.message) is flows:
                    by_flow.setdefault(self._flow(entry.message), []).append(entry.message.id)
            if by_flow:
                flows.remove(by_flow)
        if gone:
            self._waiting = None
        return {entry.message.id for entry in gone}

    def waiting(self, count: int) -> tuple[Queued, ...]:
        """The requests that `pop` would return. The same tuple for the same `count` until the queue changes."""
        if self._waiting is None or self._waiting[0] != count:
            self._waiting = count, self._first(count)
        return self._waiting[1]

    def get(self, id: str) -> Queued | None:
        return self._entries.get(id)

    def ahead(self, newest: Generate, without: Collection[str] = ()) -> int:
        """How many of the requests that wait now, but for those that are to leave (`without`), are admitted before this one, the newest of its line."""
        if not without and not (len(self._interactive) and len(self._batch)):
            return self._flows(newest).before_last(self._flow(newest))
        wanted = self._entries[newest.id]
        number = next(number for number, entry in enumerate(self._merged()) if entry is wanted)
        leaving = islice(self._merged(), number) if without else ()
        return number - sum(entry.message.id in without for entry in leaving)

    def ahead_of(self, ids: Collection[str]) -> dict[str, int]:
        """For those of these requests that are in the queue: how many others are admitted before each. Takes little longer for many
        than for one."""
        wanted, found, others = set(ids), dict[str, int](), 0
        for entry in self._first(len(self)):
            if entry.message.id in wanted:
                found[entry.message.id] = others
            else:
                others += 1
        return found

    def line(self, message: Generate) -> Line:
        """The line in which this request waits, or has waited."""
        return self._is_batch(message), self._flow(message)

    @property
    def rounds(self) -> tuple[float, float]:
        """So far, of the turns of adapters with interactive requests, and with requests of the class batch."""
        return self._interactive.rounds, self._batch.rounds

    def rounds_until(self, newest: Generate) -> float:
        """Rounds from now until this request is admitted, the newest of its line."""
        return self._flows(newest).rounds_until_last(self._flow(newest))

    def own_before(self, newest: Generate) -> int:
        """How many requests of its own line are before this one, the newest."""
        return self._flows(newest).waiting(self._flow(newest)) - 1

    def _first(self, count: int) -> tuple[Queued, ...]:
        if not (len(self._interactive) and len(self._batch)):
            return self._interactive.first(count) or self._batch.first(count)
        return tuple(islice(self._merged(), count))

    def _merged(self) -> Iterator[Queued]:
        """Each class in its own order."""
        batch, since = iter(self._batch), self._since_batch
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

    def _is_batch(self, message: Generate) -> bool:
        return self._fair and message.slo.batch

    def _flows(self, message: Generate) -> DeficitRoundRobin[Queued]:
        return self._batch if self._is_batch(message) else self._interactive

    def retry_after(self, now: float) -> float:
        """Seconds after which a refused client may try again: the age of the oldest request, which is about the time that a
        request spends in the queue."""
        first = self.first_arrival
        return min(max(0.0 if first is None else now - first, RETRY_AT_LEAST), RETRY_AT_MOST)

    def _flow(self, message: Generate) -> Hashable:
        if not self._fair:
            return None
        return None if message.adapter is None else message.adapter.id

    def _displaced(self, message: Generate, now: float) -> Queued:
        own = self._flows(message)
        for flows in (self._batch,) if own is self._batch else (self._batch, own):
            fewest = own.waiting(self._flow(message)) + 2 if flows is own else 0
            if (found := self._newest_of_the_longest(flows, fewest)) is not None:
                return found
        raise QueueFull(
            f"the queue holds its {self._limit} requests; try again later", retry_after=self.retry_after(now)
        )

    def _newest_of_the_longest(self, flows: DeficitRoundRobin[Queued], fewest: int) -> Queued | None:
        """Of a flow with at least `fewest` requests; none of a call that has begun."""
        begun = set[str]()
        """Sequences of such calls. The last of a call is the newest, and knows the others."""
        for flow, id in flows.longest_first():
            if flows.waiting(flow) < fewest:
                break
            choices = self._entries[id].message.choices
            if id not in begun and all(other in self._entries for other in choices):
                return self._entries[id]
            begun.update(choices)
        return None
