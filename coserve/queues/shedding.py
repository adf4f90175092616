"""Which waiting requests cannot have their first token in time. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

from coserve.queues.inference import RETRY_AT_LEAST, RETRY_AT_MOST, InferenceQueue, Queued
from coserve.queues.pace import Pace

LEFT_ON_ARRIVAL = 0.5
"""Share of the time from one admission to the next that is left on average when a request arrives."""


@dataclass(frozen=True)
class Late:
    """`retry`: seconds after which to try again; `choices`: of the same request, which are refused, too."""

    retry: float
    choices: tuple[str, ...] = ()


class Shedding:
    """Finds late requests among those that wait behind a full batch, or in the batch for pages. A request that finds a place when it
    arrives is never refused for its time in the queue: below capacity all do.

    While requests wait behind a full batch training has next to nothing (`train_floor`, `train_patience`), so the speed at which the batch takes requests
    is about that of inference alone; with `Spatial` it is that of inference beside training. A request whose turn would come after its deadline at that speed is late when it arrives: with as many before it as in the queue now, or, where its adapter has several, at
    the speed at which adapters have their turns. One that was
    expected in time is late once it would have its first token after its deadline if it were admitted now. The time since the last admission counts as that of one more, so the speed
    is known before anybody who waited was admitted; nobody is late who would be in time even if all running requests had as many tokens as they may.
    """

    def __init__(self, queue: InferenceQueue, passed_over: Callable[[str], bool]) -> None:
        """`passed_over`: whether a request is in the batch, and steps had no pages or no room for it."""
        self._queue, self._passed_over = queue, passed_over
        self._deadlines: list[tuple[float, str, bool, tuple[str, ...]]] = []
        """Of requests that may be shed and have not expired, with their ids, whether they had to wait for a place, and the other choices of the same request:
        a heap. Some of them wait no more."""
        self._last: float | None = None
        """From when the time to the next admission is measured: the last one, or when somebody began to wait; None: nobody waits."""
        self._admitted: float | None = None
        """When the last request was admitted, whoever has waited since."""
        self._by_request = Pace()
        self._by_token = {False: Pace(), True: Pace()}
        """Of an adapter that has its turns; by class, `batch` or not."""

    @property
    def gap(self) -> float:
        """Expected seconds from one admission to the next while the batch is full; 0: not known."""
        return self._by_request.each

    def _wait(self, ahead: int, now: float) -> float:
        """Expected seconds until a request is admitted behind a full batch and `ahead` others; 0: not known."""
        return (ahead + LEFT_ON_ARRIVAL) * self._gap_now(now)

    def _gap_now(self, now: float) -> float:
        """The time since the last admission, if it is longer than usual, counts as that of one more."""
        since = 0.0 if self._admitted is None else now - self._admitted
        return self._by_request.after(since, 1) if since > self.gap else self.gap

    def _turn_wait(self, id: str) -> float:
        """The same from what its adapter has to be given until then, and how fast adapters that had their turns were: requests of others that come later may go first."""
        entry = self._queue.get(id)
        assert entry is not None, id
        return self._queue.needed(id) * self._by_token[entry.message.slo.batch].each

    @property
    def watches(self) -> bool:
        """Whether any request may become late."""
        return bool(self._deadlines)

    def admitted(self, requests: Sequence[Queued], now: float, *, full: bool) -> None:
        """These requests have left the queue for the batch. `full`: it has no place now; others may wait behind it."""
        count = len(requests)
        if count:
            self._admitted = now
        if count and self._last is not None:
            seconds = now - self._last
            self._by_request.add(seconds, count, count)
            for batch, pace in self._by_token.items():
                if own := [each for each in requests if each.message.slo.batch == batch]:
                    tokens = sum(each.cost for each in own)
                    pace.add(seconds * self._queue.taking_turns(own[0].message), tokens, len(own))
        if not (full and len(self._queue)):
            self._last = None
        elif count or self._last is None:
            self._last = now

    def arrived(
        self,
        id: str,
        due: float,
        headroom: int,
        step: float,
        first_token: float,
        now: float,
        displaced: Queued | None = None,
        *,
        full: bool = False,
        decodes: Callable[[int], float] = lambda places: math.inf,
        choices: tuple[str, ...] = (),
    ) -> float | None:
        """For a request that was just queued: seconds after which to try again, if it will be late; None if not.

        `due`: when its first token must come; infinite: it is never refused. `headroom`: how many requests can be admitted now; `step`: expected
        seconds of a generation step; `first_token`: seconds from a request's admission to its first token; `displaced`: the request that leaves the queue for it, if
        it will not be late. `full`: the batch is, whatever is being read for requests that will join it; `decodes`: most steps until so many of its places are free.
        `choices`: others of the same request, which came before it; once one of them has begun the request is never refused.
        """
        if len(self._queue) == 1:
            # The time in which nobody waited tells nothing about the speed, nor does the work before it.
            self._last = None
            self._by_request, self._by_token = Pace(), {False: Pace(), True: Pace()}
        if due == math.inf or self._has_begun(choices):
            return None
        waiting = len(self._queue) - (displaced is not None)
        ahead = self._ahead(id, displaced) - headroom if waiting > headroom else -1
        if ahead >= 0:
            gap = self._gap_now(now) if full else self.gap
            places = ahead + LEFT_ON_ARRIVAL
            if full and gap:
                places = max(places, self._turn_wait(id) / gap)
            late = now + places * gap + first_token - due
            if gap and late > 0:
                most = decodes(math.ceil(places - LEFT_ON_ARRIVAL) + 1)
                if not step or most == math.inf or now + most * step + first_token > due:
                    return _bounded(late)
        heappush(self._deadlines, (due, id, ahead >= 0, choices))
        return None

    def _has_begun(self, choices: tuple[str, ...]) -> bool:
        """Answers that have begun are not thrown away for a late one."""
        return any(self._queue.get(id) is None and not self._passed_over(id) for id in choices)

    def _ahead(self, id: str, displaced: Queued | None) -> int:
        ahead = self._queue.ahead(id)
        return ahead - (displaced is not None and self._queue.ahead(displaced.message.id) < ahead)

    def expired(self, first_token: float, now: float) -> dict[str, Late]:
        """Requests that are late, and for each when to try again: those that stay before it are admitted by then. Each is
        given once. Some may have left the queue. `first_token`: seconds from a request's admission to its first token."""
        late: dict[str, tuple[str, ...]] = {}
        while self._deadlines and self._deadlines[0][0] < now + first_token:
            _, id, waited, choices = heappop(self._deadlines)
            if (waited or self._queue.get(id) is None) and not self._has_begun(choices):
                late[id] = choices
        ahead = self._queue.ahead_of([*late, *chain.from_iterable(late.values())]) if late else {}
        return {id: Late(_bounded(self._wait(ahead.get(id, 0), now)), choices) for id, choices in late.items()}


def _bounded(seconds: float) -> float:
    return min(max(seconds, RETRY_AT_LEAST), RETRY_AT_MOST)
