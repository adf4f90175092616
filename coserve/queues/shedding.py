"""Which waiting requests cannot have their first token in time. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

from coserve.link import Generate
from coserve.queues.inference import RETRY_AT_LEAST, RETRY_AT_MOST, InferenceQueue, Line, Queued

MEMORY = 32
"""Admissions after which one counts 1/e of a new one, for the speed at which the batch takes requests."""

LATEST, FEW = 64, 16
"""Admissions from which it is learned how many requests of others are admitted in a round of the adapters' turns; fewer than `FEW` say nothing."""

OVERTAKING = 0.5
"""Of the requests before a request, at most so many more are expected to come later and to be admitted before it: who has few before it is admitted before many can come."""

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
    is about that of inference alone; with `Spatial` it is that of inference beside training. A request whose turn would come after its deadline at that speed is late when it arrives; one that was
    expected in time is late once it would have its first token after its deadline if it were admitted now. The time since the last admission counts as that of one more, so the speed
    is known before anybody who waited was admitted; nobody is late whose place would be free in time even if all running requests had as many tokens as they may.

    Adapters take turns, so requests that come later are admitted before a request whose adapter has others before it. How many is expected from the number of rounds until its
    turn, and from how many requests of others were admitted in each of the latest rounds.
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
        self._seconds = self._admissions = 0.0
        self._latest: deque[tuple[Line, tuple[float, float]]] = deque(maxlen=LATEST)
        """The line of each request that was admitted, and the rounds until then."""

    @property
    def gap(self) -> float:
        """Expected seconds from one admission to the next while the batch is full; 0: not known."""
        return self._seconds / self._admissions if self._admissions else 0.0

    def _wait(self, ahead: int, now: float) -> float:
        """Expected seconds until a request is admitted behind a full batch and `ahead` others; 0: not known."""
        gap, since = self.gap, 0.0 if self._admitted is None else now - self._admitted
        if since > gap:
            gap = (self._seconds + since) / (self._admissions + 1)
        return (ahead + LEFT_ON_ARRIVAL) * gap

    @property
    def watches(self) -> bool:
        """Whether any request may become late."""
        return bool(self._deadlines)

    def admitted(self, requests: Sequence[Queued], now: float, *, full: bool) -> None:
        """These requests have left the queue for the batch. `full`: it has no place now; others may wait behind it."""
        self._latest.extend((self._queue.line(each.message), self._queue.rounds) for each in requests)
        count = len(requests)
        if count:
            self._admitted = now
        if count and self._last is not None:
            fading = (1 - 1 / MEMORY) ** count
            self._seconds = fading * self._seconds + now - self._last
            self._admissions = fading * self._admissions + count
        if not (full and len(self._queue)):
            self._last = None
        elif count or self._last is None:
            self._last = now

    def arrived(
        self,
        request: Generate,
        due: float,
        headroom: int,
        step: float,
        first_token: float,
        now: float,
        displaced: Queued | None = None,
        *,
        full: bool = False,
        decodes: Callable[[int], float] = lambda places: math.inf,
    ) -> float | None:
        """For a request that was just queued, so it is the newest of its line: seconds after which to try again, if it will be late; None if not.

        `due`: when its first token must come; infinite: it is never refused. `headroom`: how many requests can be admitted now; `step`: expected
        seconds of a generation step; `first_token`: seconds from a request's admission to its first token; `displaced`: the request that leaves the queue for it with its other choices, if
        it will not be late. `full`: the batch is, whatever is being read for requests that will join it; `decodes`: most steps until so many of its places are free.
        Once one of its other choices, which came before it, has begun, a request is never refused.
        """
        if len(self._queue) == 1:
            # The time in which nobody waited tells nothing about the speed, nor does the work before it.
            self._last, self._seconds, self._admissions = None, 0.0, 0.0
            self._latest.clear()
        if due == math.inf or self._has_begun(request.choices):
            return None
        leaving = set[str]() if displaced is None else {displaced.message.id, *displaced.message.choices}
        waiting = len(self._queue) - len(leaving)
        ahead = self._queue.ahead(request, leaving) - headroom if waiting > headroom else -1
        if ahead >= 0:
            ahead = max(ahead, min(self._ahead_by_rounds(request) - headroom, int((1 + OVERTAKING) * ahead)))
            wait = self._wait(ahead, now) if full else (ahead + LEFT_ON_ARRIVAL) * self.gap
            late = now + wait + first_token - due
            if wait and late > 0:
                most = decodes(ahead + 1)
                if not step or most == math.inf or now + most * step + first_token > due:
                    return _bounded(late)
        heappush(self._deadlines, (due, request.id, ahead >= 0, request.choices))
        return None

    def _has_begun(self, choices: tuple[str, ...]) -> bool:
        """Answers that have begun are not thrown away for a late one."""
        return any(self._queue.get(id) is None and not self._passed_over(id) for id in choices)

    def _ahead_by_rounds(self, request: Generate) -> int:
        """How many requests are admitted before this one, later ones included: of its own line those that wait, of others as many as there were in as many rounds. 0: not known."""
        line = self._queue.line(request)
        batch, _ = line
        others = sum(each != line for each, _ in self._latest)
        if len(self._latest) < FEW or not others:
            return 0
        rounds = self._latest[-1][1][batch] - self._latest[0][1][batch]
        if rounds <= 0:
            return 0
        return self._queue.own_before(request) + math.floor(self._queue.rounds_until(request) * others / rounds)

    def expired(self, first_token: float, now: float) -> dict[str, Late]:
        """Requests that are late, and for each when to try again: those that stay before it are admitted by then. Each is
        given once. Some may have left the queue. `first_token`: seconds from a request's admission to its first token."""
        late: dict[str, tuple[str, ...]] = {}
        while self._deadlines and self._deadlines[0][0] < now + first_token:
            _, id, waited, choices = heappop(self._deadlines)
            waits = waited and self._queue.get(id) is not None
            if (waits or self._passed_over(id)) and not self._has_begun(choices):
                late[id] = choices
        ahead = self._queue.ahead_of([*late, *chain.from_iterable(late.values())]) if late else {}
        return {id: Late(_bounded(self._wait(ahead.get(id, 0), now)), choices) for id, choices in late.items()}


def _bounded(seconds: float) -> float:
    return min(max(seconds, RETRY_AT_LEAST), RETRY_AT_MOST)
