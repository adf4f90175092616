"""Which waiting requests are late, and when that is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from msgspec import structs

from coserve.link import Generate
from coserve.queues.inference import InferenceQueue, Queued
from coserve.queues.shedding import Shedding
from coserve.types import AdapterRef, SamplingParams, Slo


def request(id: str, ttft: float, *, shed: bool = True) -> Generate:
    slo = Slo(ttft=ttft, tpot=1.0, shed=shed)
    return Generate(id=id, prompt=(1,), sampling=SamplingParams(), adapter=None, slo=slo)


def admit(queue: InferenceQueue, shedding: Shedding, now: float, count: int = 1) -> None:
    shedding.admitted(queue.pop(count), now, full=True)


class Line:
    """A batch with no place, which takes a request every half second once it did so a few times."""

    def __init__(self, *, measured: bool = True) -> None:
        self.queue = InferenceQueue(100, fair=True)
        self.shedding = Shedding(self.queue, passed_over=lambda _: False)
        self.count = 0
        if measured:
            for number in range(5):
                self.queue.push(request(f"early{number}", 99.0, shed=False), arrived=0.0, deadline=99.0)
            for number in range(4):
                admit(self.queue, self.shedding, 0.5 * number)

    def arrives(
        self,
        ttft: float,
        *,
        headroom: int = 0,
        shed: bool = True,
        decodes: Callable[[int], float] = lambda places: math.inf,
    ) -> float | None:
        """At 2 s. One request waits already."""
        self.count += 1
        message = request(f"r{self.count}", ttft, shed=shed)
        self.queue.push(message, arrived=2.0, deadline=2.0 + ttft)
        due = 2.0 + ttft if shed else math.inf
        return self.shedding.arrived(message, due, headroom, 0.1, 0.1, 2.0, decodes=decodes)

    def late(self, now: float) -> list[str]:
        return list(self.shedding.expired(0.1, now))


def test_a_request_whose_turn_comes_too_late_is_refused_when_it_arrives() -> None:
    line = Line()
    assert [line.arrives(5.0) for _ in range(9)] == [None] * 9
    retry = line.arrives(2.0)
    assert retry is not None and retry > 2.0, "ten others wait, and a request is admitted each half second"


def test_whoever_finds_a_place_is_never_late_in_the_queue() -> None:
    line = Line()
    assert line.arrives(0.001, headroom=2) is None
    assert line.late(9.0) == []


def test_a_request_that_did_not_ask_for_it_is_never_refused() -> None:
    line = Line()
    assert line.arrives(0.001, shed=False) is None
    assert line.late(99.0) == []


def test_without_a_measured_speed_a_request_is_refused_once_it_is_late_and_not_before() -> None:
    line = Line(measured=False)
    assert line.arrives(3.0) is None
    assert line.late(4.85) == []
    assert line.late(4.95) == ["r1"], "its first token would take 0.1 s"
    assert line.late(9.0) == []


def test_how_long_the_batch_has_taken_nobody_tells_its_speed() -> None:
    """A batch full since 0 s, and requests with a target of 2 s, one a second."""
    queue = InferenceQueue(9, fair=True)
    shedding, refused = Shedding(queue, passed_over=lambda _: False), dict[str, float]()
    for number in range(4):
        queue.push(request(f"early{number}", 99.0, shed=False), arrived=0.0, deadline=99.0)
    admit(queue, shedding, 0.0, 4)
    for now in (1.0, 2.0, 3.0, 4.0):
        for id, late in shedding.expired(0.1, now).items():
            queue.cancel([id])
            refused[id] = late.retry
        message = request(f"at {now}", 2.0)
        queue.push(message, arrived=now, deadline=now + 2.0)
        retry = shedding.arrived(message, now + 2.0, 0, 0.1, 0.1, now, full=True)
        if retry is not None:
            queue.cancel([message.id])
            refused[message.id] = retry
    assert list(refused) == ["at 2.0", "at 1.0", "at 4.0"], "those at 2 and 4 s when they arrive"
    assert refused["at 1.0"] == 1.5, "half of the time in which nobody was admitted"


def test_nobody_is_refused_who_is_admitted_in_time_at_the_latest() -> None:
    line = Line()
    assert [line.arrives(5.0) for _ in range(9)] == [None] * 9
    assert line.arrives(2.0, decodes=lambda places: 19 if places == 11 else 99) is None, (
        "the eleventh place is free after 19 steps"
    )
    assert line.arrives(2.0, decodes=lambda places: 20) is not None


def test_the_speed_is_that_of_the_requests_that_wait_now() -> None:
    """Long answers gave a place each 5 s; then the queue was empty."""
    queue = InferenceQueue(9, fair=True)
    shedding = Shedding(queue, passed_over=lambda _: False)

    def arrives(id: str, ttft: float, now: float, *, full: bool) -> float | None:
        queue.push(message := request(id, ttft), arrived=now, deadline=now + ttft)
        return shedding.arrived(message, now + ttft, 0, 0.1, 0.1, now, full=full)

    for number in range(3):
        assert arrives(f"long{number}", 99.0, 0.0, full=True) is None
    for number in range(3):
        admit(queue, shedding, 5.0 * number)
    assert shedding.gap == pytest.approx(5.0)
    for number in range(4):
        assert arrives(f"short{number}", 1.0, 11.0, full=False) is None


def test_what_a_policy_holds_back_tells_no_speed() -> None:
    queue = InferenceQueue(9, fair=True)
    shedding = Shedding(queue, passed_over=lambda _: False)
    queue.push(held := request("held", 9.0), arrived=0.0, deadline=9.0)
    shedding.arrived(held, 9.0, 5, 0.1, 0.1, 0.0)
    shedding.admitted([], 0.0, full=False)
    shedding.admitted(queue.pop(1), 0.05, full=False)
    assert shedding.gap == 0


def test_idle_time_is_no_time_between_admissions() -> None:
    queue = InferenceQueue(9, fair=True)
    shedding = Shedding(queue, passed_over=lambda _: False)
    for now in (0.0, 10.0, 20.0):
        queue.push(request(f"r{now}", 1.0), arrived=now, deadline=now + 1)
        admit(queue, shedding, now)
    assert shedding.gap == 0


def test_idle_time_after_a_queue_that_was_cancelled_is_none_either() -> None:
    queue = InferenceQueue(9, fair=True)
    shedding = Shedding(queue, passed_over=lambda _: False)

    def arrives(id: str, now: float) -> None:
        queue.push(message := request(id, 1.0), arrived=now, deadline=now + 1)
        shedding.arrived(message, now + 1, 0, 0.1, 0.1, now)

    for id in ("a", "b"):
        arrives(id, 0.0)
    admit(queue, shedding, 0.0)
    queue.cancel(["b"])
    arrives("c", 3600.0)
    admit(queue, shedding, 3600.0)
    assert shedding.gap == 0


def test_the_entry_that_was_queued_is_found() -> None:
    queue = InferenceQueue(9, fair=True)
    queue.push(message := request("r", 1.0), arrived=0.0, deadline=1.0)
    assert isinstance(queue.get("r"), Queued)
    assert queue.get("other") is None
    assert queue.ahead(message) == 0


def served(arrivals: list[tuple[float, str, int]], *, gap: float, ttft: float) -> tuple[list[float], int, int]:
    """A full batch that takes a request each `gap` seconds. `arrivals`: time, adapter, tokens. Waits of those admitted, and how many were refused when they arrived, and later."""
    queue = InferenceQueue(9999, fair=True)
    shedding = Shedding(queue, passed_over=lambda _: False)
    waits, at_once, later, place = list[float](), 0, 0, gap
    for number, (now, adapter, tokens) in enumerate(arrivals):
        while place < now:
            popped = queue.pop(1)
            waits += [place - each.arrived for each in popped]
            shedding.admitted(popped, place, full=True)
            later += sum(len(queue.cancel([id])) for id in shedding.expired(0.02, place))
            place += gap
        message = Generate(
            id=f"r{number}", prompt=(1,) * 5, sampling=SamplingParams(max_tokens=tokens), adapter=AdapterRef(adapter, 1),
            slo=Slo(ttft=ttft, tpot=1.0, shed=True),
        )  # fmt: skip
        queue.push(message, arrived=now, deadline=now + ttft)
        if shedding.arrived(message, now + ttft, 0, 0.01, 0.02, now, full=True, decodes=lambda places: 900.0 * places):
            queue.cancel([message.id])
            at_once += 1
    return waits, at_once, later


def poisson(rate: float, mix: list[tuple[str, int]], seconds: float = 150.0) -> list[tuple[float, str, int]]:
    rng, at, found = random.Random(1), 0.0, list[tuple[float, str, int]]()
    while (at := at + rng.expovariate(rate)) < seconds:
        found.append((at, *rng.choice(mix)))
    return found


@pytest.mark.parametrize("load", [0.5, 0.8])
@pytest.mark.parametrize(
    "mix", [[("long", 900), ("long", 900), ("short", 20)], [(f"a{number}", 300) for number in range(6)]]
)
def test_below_capacity_nobody_is_refused_whatever_answers_may_have(mix: list[tuple[str, int]], load: float) -> None:
    """Answers end long before `max_tokens`."""
    waits, at_once, later = served(poisson(load / 0.2, mix), gap=0.2, ttft=4.0)
    assert (at_once, later) == (0, 0) and max(waits) < 4.0


def test_who_has_few_before_it_is_admitted_before_many_can_come() -> None:
    """Close to capacity, beside rounds in which short requests take many turns."""
    waits, at_once, later = served(poisson(0.9 / 0.2, [("long", 900), ("long", 900), ("short", 20)]), gap=0.2, ttft=4.0)
    assert at_once + later <= 0.004 * len(waits)


def test_a_line_is_served_in_order_whatever_its_requests_may_cost() -> None:
    """One adapter: the wait is known exactly."""
    mix = [("a", 20), ("a", 8000)]
    waits, at_once, later = served(poisson(1.5 / 0.2, mix), gap=0.2, ttft=4.0)
    assert max(waits) <= 4.0 and min(waits[-50:]) > 3.2, "nobody is refused who would be in time"
    assert at_once > 0.9 * (at_once + later)


def test_requests_of_others_that_come_later_are_expected() -> None:
    """Above capacity, with many adapters of which some have several requests before others."""
    mix = [(f"a{number}", 400) for number in range(32)]
    waits, at_once, later = served(poisson(1.4 / 0.02, mix, seconds=40.0), gap=0.02, ttft=3.0)
    assert at_once > 0.7 * (at_once + later), "by the queue alone less than half"
    assert len(waits) > 0.95 * 40.0 / 0.02, "the batch is full all the time"


def test_both_classes_in_one_line_are_in_order_of_arrival() -> None:
    queue = InferenceQueue(99, fair=False)
    shedding = Shedding(queue, passed_over=lambda _: False)
    messages = [
        structs.replace(request(f"r{n}", 9.0), slo=Slo(ttft=9.0, tpot=1.0, batch=n % 2 == 0)) for n in range(40)
    ]
    for message in messages:
        queue.push(message, arrived=0.0, deadline=9.0)
    for number in range(20):
        admit(queue, shedding, 0.1 * number)
    queue.push(last := request("last", 2.5), arrived=2.0, deadline=4.5)
    assert queue.ahead(last) == 20
    assert shedding.arrived(last, 4.5, 0, 0.01, 0.02, 2.0, full=True) is None, "its turn comes after 2 s"


def test_rounds_before_the_queue_was_empty_tell_nothing() -> None:
    """Then twenty adapters had a request each; now one has all."""
    queue = InferenceQueue(99, fair=True)
    shedding = Shedding(queue, passed_over=lambda _: False)

    def arrives(id: str, adapter: str, now: float, ttft: float) -> float | None:
        message = structs.replace(request(id, ttft), adapter=AdapterRef(adapter, 1))
        queue.push(message, arrived=now, deadline=now + ttft)
        return shedding.arrived(message, now + ttft, 0, 0.01, 0.02, now, full=True)

    for number in range(20):
        arrives(f"first{number}", f"a{number}", 0.0, 99.0)
    for number in range(20):
        admit(queue, shedding, 0.1 * number)
    for number in range(30):
        arrives(f"then{number}", "one", 100.0, 99.0)
    for number in range(10):
        admit(queue, shedding, 100.0 + 0.1 * number)
    assert arrives("last", "one", 101.0, 2.5) is None, "its turn comes after 2 s"
