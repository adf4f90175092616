"""Which waiting requests cannot have their first token in time. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from coserve.queues.inference import RETRY_AT_LEAST, RETRY_AT_MOST, InferenceQueue, Queued

MEMORY = 32
"""Admissions after which one counts 1/e of a new one, for the speed at which the batch takes requests."""


class Shedding:
    """Finds late requests among those that wait behind a full batch, or in the batch for pages. A request that finds a place when it
    arrives is never refused for its time in the queue: below capacity all do.

    While requests wait behind a full batch no training runs (`Slack`, `InferenceFirst`), so the speed at which the batch takes requests
    is that of inference alone; with `Spatial` it is that of inference beside training. A request whose turn would come after its deadline at that speed is late when it arrives; one that was
    expected in time is late once a step that begins now would end after its deadline.
    """

    def __init__(self, queue: InferenceQueue) -> None:
        self._queue = queue
        self._deadlines: list[tuple[float, str, bool]] = []
        """Of requests that may be shed and have not expired, with their ids, and whether they had to wait for a place: a heap. Some of
        them wait no more."""
        self._last: float | None = None
        """When the last request was admitted; None if the queue has been empty since."""
        self._seconds = self._admissions = 0.0

    @property
    def gap(self) -> float:
        """Expected seconds from one admission to the next while the batch is full; 0: not known."""
        return self._seconds / self._admissions if self._admissions else 0.0

    def admitted(self, count: int, now: float) -> None:
        """The first `count` requests have joined the batch; others may wait behind it."""
        if count and self._last is not None:
            fading = (1 - 1 / MEMORY) ** count
            self._seconds = fading * self._seconds + now - self._last
            self._admissions = fading * self._admissions + count
        if not len(self._queue):
            self._last = None
        elif count or self._last is None:
            self._last = now

    def arrived(
        self, entry: Queued, headroom: int, step: float, now: float, displaced: Queued | None = None
    ) -> float | None:
        """For a request that was just queued: seconds after which to try again, if it will be late; None if not.

        `headroom`: how many requests can be admitted now; `step`: expected seconds of a generation step; `displaced`: the request
        that leaves the queue for it, if it will not be late.
        """
        if len(self._queue) == 1:
            self._last = None  # the time in which nobody waited tells nothing about the speed
        message, slo = entry.message, entry.message.slo
        due = min(entry.deadline if slo.shed else math.inf, entry.end if slo.shed_e2e else math.inf)
        if due == math.inf:
            return None
        waiting = len(self._queue) - (displaced is not None)
        ahead = self._ahead(message.id, displaced) - headroom if waiting > headroom else -1
        late = now + ahead * self.gap + step - due
        if self.gap and ahead >= 0 and late > 0:
            return _bounded(late)
        heappush(self._deadlines, (due, message.id, ahead >= 0))
        return None

    def _ahead(self, id: str, displaced: Queued | None) -> int:
        ahead = self._queue.ahead(id)
        return ahead - (displaced is not None and self._queue.ahead(displaced.message.id) < ahead)

    def expired(self, step: float, now: float) -> dict[str, float]:
        """Requests that are late, and for each the seconds after which to try again, by which those that stay before it are admitted. Each is
        given once. Some may have left the queue."""
        late: list[str] = []
        while self._deadlines and self._deadlines[0][0] < now + step:
            _, id, waited = heappop(self._deadlines)
            if waited or self._queue.get(id) is None:
                late.append(id)
        ahead = self._queue.ahead_of(late) if late else {}
        return {id: _bounded(ahead.get(id, 0) * self.gap) for id in late}


def _bounded(seconds: float) -> float:
    return min(max(seconds, RETRY_AT_LEAST), RETRY_AT_MOST)
