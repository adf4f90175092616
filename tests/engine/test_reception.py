"""Requests that arrive at a full queue: who goes, and who is told to come later."""

from __future__ import annotations

from collections.abc import Sequence

from coserve.core.link.generation import Generate, RequestFailed
from coserve.core.sampling import SamplingParams
from coserve.core.training.micro_step import MicroStep
from coserve.core.types import AdapterRef, Slo
from coserve.engine.reception import Reception
from coserve.engine.views import Views
from coserve.generate.schedule import Scheduler
from coserve.queues.request import State
from coserve.queues.shapes import StepShape
from tests.support.pages import BareAdapters, BarePages, next_scheduled
from tests.support.work import lines_of

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
    id: str,
    ttft: float = 60.0,
    *,
    batch: bool = False,
    shed: bool = False,
    adapter: str = "a",
    e2e: float | None = None,
    prompt: int = 1,
    choices: tuple[str, ...] = (),
) -> Generate:
    slo = Slo(ttft=ttft, tpot=1.0, e2e=e2e, batch=batch, shed=shed, shed_e2e=e2e is not None)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    ref = AdapterRef(adapter, 1)
    return Generate(id=id, prompt=(1,) * prompt, sampling=sampling, adapter=ref, slo=slo, choices=choices)


class Line:
    """A queue before a batch of one place, which has taken a request each second, at 0 to 3 s."""

    def __init__(self, limit: int = LIMIT, *, prompt_step: float = 0.0) -> None:
        """`prompt_step`: seconds of a step with prompts; 0: none was measured."""
        self.refused, self.retry_after = dict[str, str](), dict[str, float]()
        self.scheduler = Scheduler(
            BarePages(1 << 12, 64), BareAdapters(), max_running=1, step_tokens=64, max_queue=limit
        )
        views = Views(NoJobs())
        for _ in range(9 if prompt_step else 0):
            views.step_took(StepShape(1, 1), prompt_step)
            views.step_took(StepShape(prefill=64), prompt_step)
            views.view(self.scheduler.propose(), 0.0)
        self._reception = Reception(self.scheduler, views, send=self._refuse)
        for number in range(4):
            self.arrives(request(f"early{number}"), 0.0)
            self.admits(float(number))

    def _refuse(self, messages: Sequence[RequestFailed]) -> None:
        for message in messages:
            self.refused[message.id] = message.code
            self.retry_after[message.id] = message.retry_after or 0.0

    def arrives(self, request: Generate, now: float = 4.0) -> None:
        self._reception.enqueue(request, now)

    def admits(self, now: float) -> str:
        """The request in the batch ends, and the next one has its place."""
        for running in [each for each in self.scheduler.requests.values() if each.state is State.ACTIVE]:
            self.scheduler.remove(running)
        queued = len(self.scheduler.queue)
        (share,) = next_scheduled(self.scheduler)
        self._reception.admitted(queued - len(self.scheduler.queue), now)
        return share.request.id

    def refuse_late(self, now: float) -> None:
        self._reception.refuse_late(now)

    def cancel(self, id: str) -> None:
        self._reception.cancel(id)

    def ids(self) -> list[str]:
        return [entry.id for entry in self.scheduler.queue.waiting(999)]


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
    assert len(line.scheduler.queue) == LIMIT


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


def lines_to_refuse(count: int) -> int:
    line = Line(count)
    for number in range(count):
        line.arrives(request(f"r{number}", 2.0 * count, shed=True, batch=number % 3 == 0, adapter=f"{number % 7}"))
    lines = lines_of(lambda: line.refuse_late(9.0 * count))
    assert len(line.refused) == count
    return lines


def test_each_of_many_that_become_late_at_once_takes_as_little_work_as_one_of_few() -> None:
    assert lines_to_refuse(400) < 5 * lines_to_refuse(100), "all streams wait for it"


def lines_to_cancel(count: int) -> int:
    line = Line(count)
    for number in range(count):
        line.arrives(request(f"r{number}", adapter=f"{number % 7}"))

    def cancel() -> None:
        for number in range(count):
            line.cancel(f"r{number}")
        line.refuse_late(4.0)

    lines = lines_of(cancel)
    assert line.ids() == []
    return lines


def test_each_of_many_clients_that_leave_at_once_takes_as_little_work_as_one_of_few() -> None:
    assert lines_to_cancel(400) < 5 * lines_to_cancel(100)


def test_a_whole_call_that_goes_is_not_counted_before_the_one_that_comes() -> None:
    """Four of others stay before it, so its first token comes after 5 s or so."""
    line = Line(limit=12)
    for number in range(4):
        line.arrives(request(f"r{number}"))
    for number in range(8):
        choices = tuple(f"c{before}" for before in range(7)) if number == 7 else ()
        line.arrives(request(f"c{number}", choices=choices))
    line.arrives(request("new", 6.0, shed=True, adapter="other"))
    assert (line.refused, len(line.scheduler.queue)) == ({"c7": "queue_full"}, 5)


def test_choices_of_which_one_has_begun_are_not_refused() -> None:
    line = Line(limit=20)
    line.arrives(request("c0", 3.0))
    line.arrives(request("c1", 3.0, shed=True, choices=("c0",)))
    assert line.admits(4.5) == "c0"
    line.refuse_late(9.0)
    line.arrives(request("d1", 0.1, shed=True, choices=("d0",)))
    line.refuse_late(9.0)
    assert line.refused == {}


def test_those_that_become_late_together_are_refused_together() -> None:
    line = Line()
    for number in range(LIMIT - 1):
        line.arrives(request(f"r{number}", 9.0, shed=number % 2 == 1, adapter="ab"[number // 2]))
    line.refuse_late(12.9)
    assert line.refused == {}
    line.refuse_late(13.1)
    assert line.refused == {"r1": "overloaded", "r3": "overloaded"}
    assert line.ids() == ["r0", "r2"]
    assert all(1 <= retry <= 30 for retry in line.retry_after.values())


def test_an_answer_and_a_long_prompt_need_time_before_the_deadline() -> None:
    """Steps with prompts take 0.2 s, and a first token comes after two of them."""
    line = Line(prompt_step=0.2)
    line.arrives(request("other", 99.0))
    line.arrives(request("plain", 5.0, shed=True))
    line.arrives(request("whole answer", e2e=6.4))
    line.arrives(request("long", 6.8, shed=True, prompt=640))
    line.refuse_late(8.55)
    assert line.refused == {}
    line.refuse_late(8.65)
    assert set(line.refused) == {"plain", "whole answer", "long"}, (
        "they have until 9 s, as the answer takes 1.4 s, and nine steps before the last one of a prompt 1.8 s"
    )


def test_whoever_left_is_not_counted_before_the_next_one_and_not_refused() -> None:
    line = Line(limit=20)
    for number in range(9):
        line.arrives(request(f"r{number}"))
    line.arrives(request("gone", 30.0, shed=True))
    for id in ("gone", *(f"r{number}" for number in range(8))):
        line.cancel(id)
    line.arrives(request("new", 2.5, shed=True))
    assert line.refused == {}
    line.refuse_late(99.0)
    assert (line.refused, line.ids()) == ({"new": "overloaded"}, ["r8"])


def test_a_request_that_found_a_place_is_not_refused_when_its_time_is_over() -> None:
    line = Line()
    line.scheduler.remove(line.scheduler.requests["early3"])
    line.arrives(request("served", 0.001, shed=True))
    line.refuse_late(99.0)
    assert line.refused == {}


def test_a_request_that_has_begun_is_not_refused() -> None:
    line = Line()
    line.arrives(request("first", 9.0, shed=True))
    assert line.admits(5.0) == "first"
    line.refuse_late(99.0)
    assert line.refused == {}


def test_an_id_that_is_there_already_is_refused_alone() -> None:
    line = Line()
    line.arrives(request("twice"))
    line.arrives(request("twice"))
    assert (line.refused, line.ids()) == ({"twice": "invalid_request"}, ["twice"])
