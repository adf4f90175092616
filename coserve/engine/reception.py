"""Requests that arrive: they are queued, or refused with the time after which to try again."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heappop, heappush

from coserve.core.errors import InvalidRequest, Overloaded, QueueFull
from coserve.core.link import Generate, RequestFailed
from coserve.engine.views import Views
from coserve.generate.schedule import Scheduler
from coserve.queues.request import Request, State
from coserve.queues.shedding import QueueSpeed, retry_after

FIRST_TOKEN_STEPS = 2
"""Steps with prompts from a request's admission to its first token: the one in flight, and its own."""


class Reception:
    """Puts requests into the queue. Refuses those that it has no place for, and those whose first token would come too
    late: when they arrive, by the wait that is predicted then, or once no admission could be in time any more. A
    request that finds a place when it arrives is never refused for being late: below capacity all do. All requests of a
    call are refused together, and none once one of them has left the queue."""

    def __init__(self, scheduler: Scheduler, views: Views, send: Callable[[Sequence[RequestFailed]], None]) -> None:
        self._scheduler, self._views, self._send = scheduler, views, send
        self._speed = QueueSpeed()
        self._deadlines: list[tuple[float, str]] = []
        """When the first tokens of requests that wait for a place must come, and their ids: a heap. Some have ended
        since."""
        self._cancelled: list[str] = []
        """Requests that leave the queue before anybody looks at it: many take little longer than one."""

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
        """A client left, whose request waits in the queue. It leaves it with the next call of `enqueue` or
        `refuse_late`."""
        self._cancelled.append(id)

    def admitted(self, count: int, now: float) -> None:
        """So many requests have left the queue, for the batch or to have their adapters read."""
        full = self._scheduler.places <= 0
        self._speed.admitted(count, now, others_wait=full and len(self._scheduler.queue) > 0)

    def refuse_late(self, now: float) -> None:
        """Before each decision: requests in the queue that would be late if they were admitted now."""
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
        """By how many seconds the first token of a request that was just queued will be late; 0: it will not, or is not
        to be refused for it.
        `leaving`: requests that would leave the queue for it."""
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
        """When a request's first token would have to come if one step computed its prompt; infinite where it is not to
        be refused for being late."""
        slo, sampling = request.message.slo, request.sampling
        tokens = request.max_tokens if sampling.ignore_eos else max(sampling.min_tokens, self._scheduler.lengths.mean)
        answer = min(request.decodes, max(0.0, tokens - 1)) * self._views.decode_seconds
        due = min(request.deadline if slo.shed else math.inf, request.end - answer if slo.shed_e2e else math.inf)
        return due - (-(-request.pending // self._scheduler.budget.tokens) - 1) * self._views.prompt_step_seconds

    @property
    def _first_token_seconds(self) -> float:
        """From a request's admission to its first token, at most."""
        return max(self._views.step_seconds, FIRST_TOKEN_STEPS * self._views.prompt_step_seconds)

    def _has_begun(self, choices: Iterable[str]) -> bool:
        """Answers that have begun are not thrown away for a late one."""
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
    retry = retry_after(seconds)
    why = f"no place in the batch before the time that the request's targets leave; try again in {retry:.0f} s"
    return Overloaded(why, retry_after=retry)
