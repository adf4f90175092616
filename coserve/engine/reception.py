"""Requests that arrive: they are queued, or refused with the time after which to try again."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import chain

from coserve.engine.running import RunningRequests
from coserve.engine.views import Views
from coserve.errors import Overloaded, QueueFull
from coserve.link import Generate, RequestFailed
from coserve.queues.inference import InferenceQueue, Queued
from coserve.queues.shedding import Shedding

MOST_STEPS = 3
"""Steps with prompts from a request's admission to its first token, at most: the one in flight, one with others' prompts, its own."""


class Reception:
    """Puts requests into the queue. Refuses those that it has no place for, and those whose first token will come too late
    (`queues/shedding.py`), as soon as that is known."""

    def __init__(
        self,
        queue: InferenceQueue,
        running: RunningRequests,
        views: Views,
        *,
        send: Callable[[Sequence[RequestFailed]], None],
        cancel: Callable[[str], None],
    ) -> None:
        """`cancel` a request that the generator has."""
        self._queue, self._running, self._views = queue, running, views
        self._send, self._cancel = send, cancel
        self._shedding = Shedding(queue, running.passed_over)
        self._cancelled: list[str] = []
        """Requests that leave the queue before anybody looks at it: many take little longer than one."""

    def enqueue(self, request: Generate, now: float, *, reading: int) -> None:
        """`reading`: how many requests wait for their adapters to be read."""
        self._cancel_all()
        arrived = now if request.arrived is None else min(now, request.arrived)
        try:
            displaced = self._queue.push(request, arrived=arrived, deadline=arrived + request.slo.ttft)
        except QueueFull as error:
            self._remove(request.choices)
            self._refuse(request.id, error)
            return
        entry = self._queue.get(request.id)
        assert entry is not None, "it was queued"
        views = self._views
        retry = self._shedding.arrived(
            request, self._due(entry), views.headroom(reading), views.step_seconds, self._first_token_seconds, now, displaced,
            full=views.headroom(0) <= 0, decodes=self._running.most_decodes,
        )  # fmt: skip
        if retry is not None:
            self._remove([request.id, *request.choices])
            self._refuse(request.id, _overloaded(retry))
        elif displaced is not None:
            self._remove([displaced.message.id, *displaced.message.choices])
            why = "the queue is full, and other requests go first; try again later"
            self._refuse(displaced.message.id, QueueFull(why, retry_after=self._queue.retry_after(now)))

    def cancel(self, id: str) -> bool:
        """A client left: whether its request waits in the queue. It leaves it with the next call of `enqueue` or `refuse_late`."""
        if self._queue.get(id) is None:
            return False
        self._cancelled.append(id)
        return True

    def _cancel_all(self) -> None:
        if self._cancelled:
            self._queue.cancel(self._cancelled)
            self._cancelled.clear()

    def admitted(self, requests: Sequence[Queued], now: float) -> None:
        """These requests have left the queue, for the batch or to have their adapters read."""
        self._shedding.admitted(requests, now, full=self._views.headroom(0) <= 0)

    def _due(self, entry: Queued) -> float:
        """When a request's first token would have to come if one step computed its prompt; infinite where it is not to be refused for being late. An answer's
        tokens take no longer than a step with others' prompts each."""
        slo, views = entry.message.slo, self._views
        decodes = self._running.expected_decodes(entry.message.sampling)
        answer = decodes * max(views.decode_seconds, min(self._running.token_seconds, views.prompt_step_seconds))
        due = min(entry.deadline if slo.shed else math.inf, entry.end - answer if slo.shed_e2e else math.inf)
        return due - self._long_prompt_seconds(entry.tokens)

    @property
    def _first_token_seconds(self) -> float:
        """From a request's admission to its first token, as few others have exceeded; at least the next step, which it may have to wait for, and no more
        than `MOST_STEPS` with prompts: what took longer was a machine that stood still, or pages that were missing. Prompts in the batch that fill several steps
        go first."""
        views, most = self._views, MOST_STEPS * self._views.prompt_step_seconds
        usual = max(views.step_seconds, min(self._running.first_token_seconds, most))
        return usual + self._long_prompt_seconds(self._running.prompt_tokens)

    def _long_prompt_seconds(self, tokens: int) -> float:
        return self._views.long_prompt_seconds(int(self._running.uncached_share * tokens))

    def refuse_late(self, now: float) -> None:
        """Before each decision. Refuse the requests that have become late: in the queue, or in the batch if no step had pages or room for them."""
        self._cancel_all()
        if not self._shedding.watches:
            return
        late = self._shedding.expired(self._first_token_seconds, now)
        if not late:
            return
        gone = self._remove(late)
        self._remove([*chain.from_iterable(late[id].choices for id in gone)])
        self._send([_failed(id, _overloaded(one.retry)) for id, one in late.items() if id in gone])

    def _remove(self, ids: Collection[str]) -> set[str]:
        """Take those of these requests that have not begun out of the queue and the batch. Returns their ids."""
        gone = self._queue.cancel(ids)
        for id in set(ids) - gone:
            if self._running.passed_over(id):
                self._running.remove(id)
                self._cancel(id)
                gone.add(id)
        return gone

    def _refuse(self, id: str, error: QueueFull | Overloaded) -> None:
        self._send([_failed(id, error)])


def _overloaded(retry: float) -> Overloaded:
    why = f"no place in the batch before the time that the request's targets leave; try again in {retry:.0f} s"
    return Overloaded(why, retry_after=retry)


def _failed(id: str, error: QueueFull | Overloaded) -> RequestFailed:
    return RequestFailed(id=id, code=error.code, message=error.message, retry_after=error.retry_after)
