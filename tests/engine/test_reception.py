"""Requests that arrive at a full queue: who goes, and who is told to come later."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

from coserve.engine.reception import Reception
from coserve.engine.running import RunningRequests
from coserve.engine.views import Views
from coserve.link import Generate, RequestFailed
from coserve.queues.inference import InferenceQueue
from coserve.types import AdapterRef, MicroStep, SamplingParams, Slo

LIMIT = 5


class NoJobs:
    def ready(self) -> tuple[str, ...]:
        return ()

    def next_micro_step(self, job: str) -> MicroStep:
        raise AssertionError(job)

    def micro_batch_tokens(self, job: str) -> int:
        raise AssertionError(job)

    def in_training(self, job: str) -> bool:
        raise AssertionError(job)


def request(id: str, ttft: float = 60.0, *, batch: bool = False, shed: bool = False, adapter: str = "a") -> Generate:
    slo = Slo(ttft=ttft, tpot=1.0, batch=batch, shed=shed)
    return Generate(id=id, prompt=(1,), sampling=SamplingParams(max_tokens=8), adapter=AdapterRef(adapter, 1), slo=slo)


class Line:
    """A queue before a full batch, which takes a request each second."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.queue, self.refused = InferenceQueue(limit, fair=True), dict[str, str]()
        self.retry_after = dict[str, float]()
        running = RunningRequests(step_tokens=64)
        views = Views(self.queue, running, NoJobs(), max_running=0, step_tokens=64)
        self._reception = Reception(self.queue, running, views, send=self._refuse, cancel=self.refused.__delitem__)
        for number in range(4):
            self.arrives(request(f"early{number}"), 0.0)
        for second in range(4):
            self.queue.pop(1)
            self._reception.admitted(1, float(second))

    def _refuse(self, messages: Sequence[RequestFailed]) -> None:
        for message in messages:
            self.refused[message.id] = message.code
            self.retry_after[message.id] = message.retry_after or 0.0

    def arrives(self, request: Generate, now: float = 4.0) -> None:
        self._reception.enqueue(request, now, reading=0)

    def refuse_late(self, now: float) -> None:
        self._reception.refuse_late(now)

    def ids(self) -> list[str]:
        return [entry.message.id for entry in self.queue.waiting(99)]


def test_nobody_goes_for_a_request_that_is_refused_itself() -> None:
    line = Line()
    for number in range(LIMIT - 1):
        line.arrives(request(f"i{number}"))
    line.arrives(request("b", batch=True))
    before = line.ids()
    line.arrives(request("late", 2.0, shed=True))
    assert (line.ids(), line.refused) == (before, {"late": "overloaded"})
    line.arrives(request("in time", 9.0, shed=True))
    assert line.refused == {"late": "overloaded", "b": "queue_full"}
    assert len(line.queue) == LIMIT


def test_whoever_goes_is_not_counted_before_the_one_that_comes() -> None:
    line = Line()
    for number in range(LIMIT - 1):
        line.arrives(request(f"i{number}"))
    line.arrives(request("b", 2.0, batch=True))
    assert line.ids()[0] == "b"
    line.arrives(request("new", LIMIT - 0.5, shed=True, adapter="other"))
    assert (line.ids()[-1], line.refused) == ("new", {"b": "queue_full"})


def test_those_that_become_late_together_are_refused_together() -> None:
    line = Line()
    for number in range(LIMIT - 1):
        line.arrives(request(f"r{number}", 9.0, shed=number % 2 == 1, adapter="ab"[number // 2]))
    line.refuse_late(12.9)
    assert line.refused == {}
    line.refuse_late(13.1)
    assert line.refused == {"r1": "overloaded", "r3": "overloaded"}
    assert line.ids() == ["r0", "r2"]
    assert 1 < line.retry_after["r1"] < line.retry_after["r3"], (
        "those that stay are served first, and nobody was for long"
    )


def calls_to_refuse(count: int) -> int:
    line, calls = Line(count), 0
    for number in range(count):
        line.arrives(request(f"r{number}", 2.0 * count, shed=True, batch=number % 3 == 0, adapter=f"{number % 7}"))

    def called(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(called)
    try:
        line.refuse_late(9.0 * count)
    finally:
        sys.setprofile(None)
    assert len(line.refused) == count
    return calls


def test_each_of_many_that_become_late_at_once_takes_as_little_work_as_one_of_few() -> None:
    assert calls_to_refuse(400) < 5 * calls_to_refuse(100), "all streams wait for it"
