"""Requests that arrive at a full queue: who goes, and who is told to come later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType

from coserve.engine.reception import Reception
from coserve.engine.running import FEW_FIRSTS, RunningRequests
from coserve.engine.views import Views
from coserve.link import Generate, RequestFailed, Tokens
from coserve.queues.inference import InferenceQueue
from coserve.queues.shapes import StepShape
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


def request(
    id: str, ttft: float = 60.0, *, batch: bool = False, shed: bool = False, adapter: str = "a", e2e: float | None = None,
    prompt: int = 1, choices: tuple[str, ...] = (),
) -> Generate:  # fmt: skip
    slo = Slo(ttft=ttft, tpot=1.0, e2e=e2e, batch=batch, shed=shed, shed_e2e=e2e is not None)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    ref = AdapterRef(adapter, 1)
    return Generate(id=id, prompt=(1,) * prompt, sampling=sampling, adapter=ref, slo=slo, choices=choices)


class Line:
    """A queue before a full batch, which takes a request each second."""

    def __init__(self, limit: int = LIMIT, *, first: float = 0.0) -> None:
        """`first`: seconds that first tokens took, while steps took 0.2 s; 0: nothing was measured."""
        self.queue, self.refused = InferenceQueue(limit, fair=True), dict[str, str]()
        self.retry_after, self.cancelled = dict[str, float](), set[str]()
        running = self.running = RunningRequests(step_tokens=64)
        views = Views(self.queue, running, NoJobs(), max_running=0, step_tokens=64)
        for number in range(FEW_FIRSTS if first else 0):
            running.add(f"f{number}", Slo(ttft=1.0, tpot=1.0), now=0.0, deadline=1.0, prompt=1)
            running.accept([Tokens(id=f"f{number}", tokens=(1,), finished=None)], first)
            running.remove(f"f{number}")
            views.step_took(StepShape(1, 1, 0, 0, 0), 0.2)
            views.step_took(StepShape(prefill=64), 0.2)
            views.view(0.0, reading=0, blocked=False)
        self._reception = Reception(self.queue, running, views, send=self._refuse, cancel=self.cancelled.add)
        for number in range(4):
            self.arrives(request(f"early{number}"), 0.0)
        for second in range(4):
            self._reception.admitted(self.queue.pop(1), float(second))

    def _refuse(self, messages: Sequence[RequestFailed]) -> None:
        for message in messages:
            self.refused[message.id] = message.code
            self.retry_after[message.id] = message.retry_after or 0.0

    def arrives(self, request: Generate, now: float = 4.0) -> None:
        self._reception.enqueue(request, now, reading=0)

    def refuse_late(self, now: float) -> None:
        self._reception.refuse_late(now)

    def cancel(self, id: str) -> bool:
        return self._reception.cancel(id)

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


def test_choices_are_refused_together_while_none_has_begun() -> None:
    line = Line(limit=20)
    line.arrives(request("c0", 2.0))
    line.arrives(request("c1", 2.0, shed=True, choices=("c0",)))
    assert line.refused == {}
    line.refuse_late(6.1)
    assert (line.refused, line.ids()) == ({"c1": "overloaded"}, []), "the other one does not stay before others"
    for number in range(9):
        line.arrives(request(f"r{number}"))
    line.arrives(request("d0", 2.0))
    line.arrives(request("d1", 2.0, shed=True, choices=("d0",)))
    assert line.refused.keys() == {"c1", "d1"}, "at once"
    assert line.ids() == [f"r{number}" for number in range(9)]


def test_choices_that_the_queue_has_no_room_for_go_together() -> None:
    line = Line()
    for number in range(LIMIT - 1):
        line.arrives(request(f"r{number}"))
    line.arrives(request("c0"))
    line.arrives(request("c1", choices=("c0",)))
    assert (line.refused, line.ids()) == ({"c1": "queue_full"}, [f"r{number}" for number in range(LIMIT - 1)])


def test_choices_go_together_for_a_request_that_goes_first() -> None:
    line = Line()
    for number in range(LIMIT - 2):
        line.arrives(request(f"r{number}"))
    line.arrives(request("c0", batch=True))
    line.arrives(request("c1", batch=True, choices=("c0",)))
    line.arrives(request("new"))
    assert (line.refused, line.ids()) == ({"c1": "queue_full"}, [*(f"r{number}" for number in range(LIMIT - 2)), "new"])


def test_choices_of_which_one_has_begun_are_not_refused() -> None:
    line = Line(limit=20)
    line.arrives(request("c0", 3.0))
    line.arrives(request("c1", 3.0, shed=True, choices=("c0",)))
    assert [entry.message.id for entry in line.queue.pop(1)] == ["c0"]
    line.refuse_late(9.0)
    line.arrives(request("d1", 0.1, shed=True, choices=("d0",)))
    line.refuse_late(9.0)
    assert line.refused == {}


def test_choices_in_the_batch_that_no_step_had_room_for_are_refused_together() -> None:
    line = Line(limit=20)
    line.arrives(request("c0", 3.0))
    line.arrives(request("c1", 3.0, shed=True, choices=("c0",)))
    for entry in line.queue.pop(2):
        line.running.add(entry.message.id, entry.message.slo, now=4.0, deadline=entry.deadline, prompt=1)
    line.running.start([])  # a step without pages for them
    line.refuse_late(9.0)
    assert line.refused == {"c1": "overloaded"}
    assert line.cancelled == {"c0", "c1"}


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


def calls_of(work: Callable[[], None]) -> int:
    calls = 0

    def called(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def calls_to_refuse(count: int) -> int:
    line = Line(count)
    for number in range(count):
        line.arrives(request(f"r{number}", 2.0 * count, shed=True, batch=number % 3 == 0, adapter=f"{number % 7}"))
    calls = calls_of(lambda: line.refuse_late(9.0 * count))
    assert len(line.refused) == count
    return calls


def test_each_of_many_that_become_late_at_once_takes_as_little_work_as_one_of_few() -> None:
    assert calls_to_refuse(400) < 5 * calls_to_refuse(100), "all streams wait for it"


def test_an_answer_and_a_long_prompt_need_time_before_the_deadline() -> None:
    """A request is admitted each second, and nobody waits before them."""
    line = Line(first=0.1)
    line.arrives(request("other", 99.0))
    line.arrives(request("plain", 5.0, shed=True))
    line.arrives(request("whole answer", e2e=6.4))
    line.arrives(request("long", 6.8, shed=True, prompt=640))
    line.refuse_late(8.75)
    assert line.refused == {}
    line.refuse_late(8.85)
    assert set(line.refused) == {"plain", "whole answer", "long"}, (
        "they have until 9 s, as the answer takes 1.4 s, and nine steps before the last one of a prompt 1.8 s"
    )


def test_first_tokens_that_came_after_a_machine_stood_still_refuse_nobody() -> None:
    """They took 9 s. One takes no longer than three steps with prompts."""
    line = Line(first=9.0)
    line.arrives(request("other", 99.0))
    line.arrives(request("plain", 5.0, shed=True))
    line.refuse_late(8.3)
    assert line.refused == {}
    line.refuse_late(8.5)
    assert line.refused == {"plain": "overloaded"}


def test_long_prompts_in_the_batch_go_first() -> None:
    """Of 640 tokens nine steps of 0.2 s are computed before anybody's first token."""
    line = Line(first=0.1)
    line.arrives(request("other", 99.0))
    line.arrives(request("plain", 5.0, shed=True))
    line.running.add("long", Slo(ttft=99.0, tpot=1.0), now=4.0, deadline=103.0, prompt=640)
    line.refuse_late(6.9)
    assert line.refused == {}
    line.refuse_late(7.1)
    assert line.refused == {"plain": "overloaded"}


def test_long_prompts_that_were_in_the_prefix_cache_take_one_step() -> None:
    line = Line(first=0.1)
    for _ in range(20):
        line.running.add("cached", Slo(ttft=99.0, tpot=1.0), now=0.0, deadline=99.0, prompt=640)
        line.running.computed({"cached": 0})
        line.running.remove("cached")
    line.arrives(request("other", 99.0))
    line.arrives(request("long", 5.0, shed=True, prompt=640))
    line.refuse_late(8.75)
    assert line.refused == {}
    line.refuse_late(8.85)
    assert line.refused == {"long": "overloaded"}


def test_whoever_left_is_not_counted_before_the_next_one_and_not_refused() -> None:
    line = Line(limit=20)
    for number in range(9):
        line.arrives(request(f"r{number}"))
    line.arrives(request("gone", 30.0, shed=True))
    assert all(line.cancel(id) for id in ("gone", *(f"r{number}" for number in range(8))))
    line.arrives(request("new", 2.5, shed=True))
    assert line.refused == {}
    line.refuse_late(99.0)
    assert (line.refused, line.ids()) == ({"new": "overloaded"}, ["r8"])


def test_a_request_that_does_not_wait_is_not_cancelled_here() -> None:
    line = Line()
    assert not line.cancel("early0")


def calls_to_cancel(count: int) -> int:
    line = Line(count)
    for number in range(count):
        line.arrives(request(f"r{number}", adapter=f"{number % 7}"))

    def cancel() -> None:
        for number in range(count):
            line.cancel(f"r{number}")
        line.refuse_late(4.0)

    calls = calls_of(cancel)
    assert line.ids() == []
    return calls


def test_each_of_many_clients_that_leave_at_once_takes_as_little_work_as_one_of_few() -> None:
    assert calls_to_cancel(400) < 5 * calls_to_cancel(100)


def test_a_request_that_found_a_place_costs_nothing_when_its_time_is_over() -> None:
    """However many wait then."""

    def calls(waiting: int) -> int:
        line = Line(500)
        line.refuse_late(4.0)
        line.arrives(request("served", 3.0, shed=True))
        line.queue.pop(1)
        for number in range(waiting):
            line.arrives(request(f"r{number}", batch=number % 3 == 0))
        return calls_of(lambda: line.refuse_late(9.0))

    assert calls(400) == calls(4)


def test_a_whole_call_that_goes_is_not_counted_before_the_one_that_comes() -> None:
    """Four of others stay before it, so its first token comes after 5 s or so."""
    line = Line(limit=12)
    for number in range(4):
        line.arrives(request(f"r{number}"))
    for number in range(8):
        choices = tuple(f"c{before}" for before in range(7)) if number == 7 else ()
        line.arrives(request(f"c{number}", choices=choices))
    line.arrives(request("new", 6.0, shed=True, adapter="other"))
    assert (line.refused, len(line.queue)) == ({"c7": "queue_full"}, 5)
