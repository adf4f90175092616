"""Reception of requests: each is queued, or refused by its expected delay with a time after which to retry."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heappop, heappush

from coserve.core.errors import InvalidRequest, Overloaded, QueueFull
from coserve.core.link.generation import Generate, RequestFailed
from coserve.engine.views import Views
from coserve.generate.schedule import Scheduler
from coserve.queues.inference import RETRY_AT_LEAST, RETRY_AT_MOST
from coserve.queues.request import Request, State

MEMORY = 32
"""Decay of the admission rate: after this many newer admissions, one has 1/e of the weight of a new one."""
LEFT_ON_ARRIVAL = 0.5
"""Mean fraction of the gap between admissions that is left when a request arrives."""
FIRST_TOKEN_STEPS = 2
"""Steps with prompts between a request's admission and its first token: the one in flight, and its own."""


class QueueSpeed:
    """Learns the time between admissions while requests wait behind a full batch. Training gets next to nothing then
    (`train_floor`, `train_patience`), so it is about the speed of inference without training; with `Spatial`, of
    inference overlapped with training."""

    def __init__(self) -> None:
        self._since: float | None = None
        """Start of the gap being measured: the last admission, or when a request began to wait; None: nobody waits."""
        self._last = 0.0
        """When the last request was admitted, whether others waited or not."""
        self._seconds = self._admissions = 0.0

    def began_to_wait(self) -> None:
        """A request came to an empty queue: forget the past, which does not predict its wait."""
        self._since, self._seconds, self._admissions = None, 0.0, 0.0

    def admitted(self, count: int, now: float, *, others_wait: bool) -> None:
        """`count` requests have left the queue. `others_wait`: further ones wait behind a full batch."""
        if count:
            self._last = now
        if count and self._since is not None:
            fading = (1 - 1 / MEMORY) ** count
            self._seconds = fading * self._seconds + now - self._since
            self._admissions = fading * self._admissions + count
        if not others_wait:
            self._since = None
        elif count or self._since is None:
            self._since = now

    def wait(self, ahead: int, now: float, *, full: bool) -> float:
        """Expected seconds until a request behind `ahead` others is admitted; 0: unknown. While the batch is `full`,
        the gap since the last admission counts as one more sample if it is longer, so the speed is known before anyone
        who waited was admitted."""
        gap, since = self.gap, now - self._last
        if full and since > gap:
            gap = (self._seconds + since) / (self._admissions + 1)
        return (ahead + LEFT_ON_ARRIVAL) * gap

    @property
    def gap(self) -> float:
        """Expected seconds from one admission to the next; 0: not known."""
        return self._seconds / self._admissions if self._admissions else 0.0


class Reception:
    """Puts requests into the queue, or refuses them. A request is refused if the queue has no place, or if its first
    token would be late: on arrival, by its predicted wait, or later, once no admission could be in time. A request that
    finds a place in the batch on arrival is never refused as late; below capacity every request finds one. All choices
    of a call are refused together, and none once one of them has left the queue."""

    def __init__(self, scheduler: Scheduler, views: Views, send: Callable[[Sequence[RequestFailed]], None]) -> None:
        self._scheduler, self._views, self._send = scheduler, views, send
        self._speed = QueueSpeed()
        self._deadlines: list[tuple[float, str]] = []
        """Heap of (latest admission time of queued requests, request id). Some of them have ended since."""
        self._cancelled: list[str] = []
        """Queued requests to cancel before the queue is next used; together, as one call for many costs little more
        than for one."""

    def enqueue(self, message: Generate, now: float) -> None:
        self._cancel_all()
        request = Request(message, now if message.arrived is None else min(now, message.arrived))
        queue, own = self._scheduler.queue, [message.id, *message.choices]
        try:
            displaced = self._scheduler.arrive(request)
        except (QueueFull, InvalidRequest) as error:
            self._scheduler.cancel_queued(message.choices)
            self._refuse([message.id], error)
            return
        leaving = [] if displaced is None else [displaced.id, *displaced.message.choices]
        if len(queue) == 1:
            self._speed.began_to_wait()
        if (late := self._late(request, leaving, now)) > 0:
            self._scheduler.cancel_queued(own)
            self._refuse([message.id], _overloaded(late))
        elif displaced is not None:
            self._scheduler.cancel_queued(leaving)
            why = "the queue is full, and other requests go first; try again later"
            self._refuse([displaced.id], QueueFull(why, retry_after=queue.retry_after(now)))

    def cancel(self, id: str) -> None:
        """Cancel a queued request whose client has left. It leaves the queue at the next `enqueue` or `refuse_late`."""
        self._cancelled.append(id)

    def admitted(self, count: int, now: float) -> None:
        """`count` requests have left the queue, for the batch or to have their adapters read."""
        full = self._scheduler.places <= 0
        self._speed.admitted(count, now, others_wait=full and len(self._scheduler.queue) > 0)

    def refuse_late(self, now: float) -> None:
        """Refuse queued requests that would be late even if admitted now. Call it before each decision."""
        self._cancel_all()
        late = list[Request]()
        while self._deadlines and self._deadlines[0][0] < now + self._first_token_seconds:
            request = self._scheduler.requests.get(heappop(self._deadlines)[1])
            if request is None or request.state is not State.QUEUED or self._has_begun(request.message.choices):
                continue
            late.append(request)
        if late:
            error = _overloaded(self._scheduler.queue.retry_after(now))
            self._scheduler.cancel_queued([id for each in late for id in (each.id, *each.message.choices)])
            self._refuse([each.id for each in late], error)

    def _late(self, request: Request, leaving: Collection[str], now: float) -> float:
        """Seconds by which a newly queued request's first token is predicted to be late; 0: it is not, or must not be
        refused for it. `leaving`: requests that would leave the queue for it."""
        due = self._due(request)
        if due == math.inf or self._has_begun(request.message.choices):
            return 0.0
        scheduler, queue = self._scheduler, self._scheduler.queue
        headroom = scheduler.headroom
        ahead = queue.ahead(request, leaving) - headroom if len(queue) - len(leaving) > headroom else -1
        if ahead < 0:
            return 0.0
        wait = self._speed.wait(ahead, now, full=scheduler.places <= 0)
        late = now + wait + self._first_token_seconds - due
        if wait and late > 0:
            return late
        heappush(self._deadlines, (due, request.id))
        return 0.0

    def _due(self, request: Request) -> float:
        """Deadline of a request's first token, moved earlier for each further step that its prompt needs; infinite if
        it must not be refused as late."""
        slo, sampling = request.message.slo, request.sampling
        tokens = request.max_tokens if sampling.ignore_eos else max(sampling.min_tokens, self._scheduler.lengths.mean)
        answer = min(request.decodes, max(0.0, tokens - 1)) * self._views.decode_seconds
        due = min(request.deadline if slo.shed else math.inf, request.end - answer if slo.shed_e2e else math.inf)
        return due - (-(-request.pending // self._scheduler.budget.tokens) - 1) * self._views.prompt_step_seconds

    @property
    def _first_token_seconds(self) -> float:
        """Upper bound of the time from a request's admission to its first token."""
        return max(self._views.step_seconds, FIRST_TOKEN_STEPS * self._views.prompt_step_seconds)

    def _has_begun(self, choices: Iterable[str]) -> bool:
        """Whether one of the call's choices has left the queue: begun answers are not discarded for a late one."""
        found = map(self._scheduler.requests.get, choices)
        return any(request is None or request.state is not State.QUEUED for request in found)

    def _cancel_all(self) -> None:
        if self._cancelled:
            self._scheduler.cancel_queued(self._cancelled)
            self._cancelled.clear()

    def _refuse(self, ids: Iterable[str], error: QueueFull | InvalidRequest) -> None:
        retry = error.retry_after if isinstance(error, QueueFull) else None
        self._send([RequestFailed(id=id, code=error.code, message=error.message, retry_after=retry) for id in ids])


def _overloaded(seconds: float) -> Overloaded:
    retry = min(max(seconds, RETRY_AT_LEAST), RETRY_AT_MOST)
    why = f"no place in the batch before the time that the request's targets leave; try again in {retry:.0f} s"
    return Overloaded(why, retry_after=retry)
