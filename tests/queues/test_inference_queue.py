"""The queue of requests: turns, classes, places, and how long one waits behind a full batch."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coserve.core.errors import QueueFull
from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, Slo
from coserve.engine.reception import QueueSpeed
from coserve.queues.inference import QUANTUM, InferenceQueue
from coserve.queues.request import Request

LIMIT = 5


def request(
    id: str, adapter: str | None = None, *, version: int = 1, prompt: int = 1, max_tokens: int = 128
) -> Generate:
    return Generate(
        id=id,
        prompt=(1,) * prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        adapter=None if adapter is None else AdapterRef(adapter, version),
        slo=Slo(ttft=1.0, tpot=0.1),
    )


def push(queue: InferenceQueue, message: Generate, arrived: float = 0.0) -> Request | None:
    return queue.push(Request(message, arrived))


def fill(queue: InferenceQueue, *requests: Generate, arrived: float = 0.0) -> None:
    for one in requests:
        assert push(queue, one, arrived) is None


def ids(queue: InferenceQueue, count: int = 99) -> list[str]:
    return [entry.id for entry in queue.pop(count)]


def test_full_queue_says_when_to_come_back() -> None:
    queue = InferenceQueue(2, fair=True)
    fill(queue, request("a"))
    fill(queue, request("b"), arrived=1.0)
    for now, seconds in [(1.5, 1.5), (0.1, 1.0), (1000.0, 30.0)]:
        with pytest.raises(QueueFull, match="2 requests") as caught:
            push(queue, request("c"), now)
        assert caught.value.retry_after == queue.retry_after(now) == seconds
    assert ids(queue) == ["a", "b"]
    assert queue.first_arrival is None
    assert queue.retry_after(1.0) == 1.0


def test_adapters_take_turns_and_their_versions_share_one() -> None:
    hot = [request(f"h{i}", "hot", version=1 + i % 2, max_tokens=QUANTUM - 1) for i in range(4)]
    others = [request("x", "other", max_tokens=QUANTUM - 1), request("b0"), request("b1")]
    queue = InferenceQueue(9, fair=True)
    fill(queue, *hot, *others)
    assert [entry.id for entry in queue.waiting(99)] == ["h0", "x", "b0", "h1", "b1", "h2", "h3"]
    assert ids(queue, 2) == ["h0", "x"]
    fill(queue, request("late", "new"))
    assert ids(queue) == ["b0", "h1", "late", "b1", "h2", "h3"]
    strict = InferenceQueue(9, fair=False)
    fill(strict, *hot, *others)
    assert ids(strict) == ["h0", "h1", "h2", "h3", "x", "b0", "b1"]


def test_a_prompt_counts_as_much_as_an_answer() -> None:
    queue = InferenceQueue(9, fair=True)
    fill(
        queue,
        request("long", "a", prompt=2 * QUANTUM),
        request("answer", "b", max_tokens=QUANTUM),
        request("short", "c"),
    )
    assert ids(queue) == ["short", "answer", "long"]


def test_a_choice_goes_only_while_none_of_its_request_has_begun() -> None:
    queue = InferenceQueue(3, fair=True)
    last = msgspec.structs.replace(request("h2", "hot"), choices=("h0", "h1"))
    fill(queue, request("h0", "hot"), request("h1", "hot"), last)
    displaced = push(queue, request("x", "light"), 2.0)
    assert displaced is not None and displaced.id == "h2"
    assert queue.cancel(["x"]) and ids(queue, 1) == ["h0"]
    fill(queue, request("y", "other"))
    with pytest.raises(QueueFull):
        push(queue, request("x", "light"), 2.0)


def test_who_has_not_begun_goes_for_one_whose_choices_have() -> None:
    queue = InferenceQueue(5, fair=True)
    last = msgspec.structs.replace(request("c2", "hot"), choices=("c0", "c1"))
    fill(queue, request("c0", "hot"), request("old", "hot"), request("c1", "hot"), last)
    assert ids(queue, 1) == ["c0"]
    fill(queue, request("b0", "base"), request("b1", "base"))
    displaced = push(queue, request("x", "light"), 2.0)
    assert displaced is not None and displaced.id == "old"
    assert queue.cancel(["old"]) and queue.cancel(["x"])
    fill(queue, request("b2", "base"))
    displaced = push(queue, request("x", "light"), 2.0)
    assert displaced is not None and displaced.id == "b2"


def test_an_adapter_gives_way_though_the_class_batch_has_begun() -> None:
    queue = InferenceQueue(5, fair=True)
    last = msgspec.structs.replace(of_class("b1", batch=True), choices=("b0",))
    fill(queue, *(request(f"h{i}", "hot") for i in range(4)), last)
    displaced = push(queue, request("x", "light"), 2.0)
    assert displaced is not None and displaced.id == "h3"
    assert queue.cancel(["h3"])
    with pytest.raises(QueueFull):
        push(queue, of_class("b2", batch=True, adapter="light"), 2.0)


class QueueAgainstLists(RuleBasedStateMachine):
    @initialize(fair=st.booleans())
    def start(self, fair: bool) -> None:
        self.fair = fair
        self.queue = InferenceQueue(LIMIT, fair=fair)
        self.model: list[tuple[str, float]] = []  # in order of arrival; the first letter is the adapter
        self.gone: list[str] = []
        self.now = 0.0
        self.made = 0

    def waiting(self, flow: str) -> list[str]:
        return [id for id, _ in self.model if id[0] == flow or not self.fair]

    @rule(later=st.integers(0, 3), flow=st.sampled_from("abn"), tokens=st.integers(1, 3 * QUANTUM))
    def push(self, later: int, flow: str, tokens: int) -> None:
        self.now += later
        self.made += 1
        new = request(f"{flow}{self.made}", None if flow == "n" else flow, max_tokens=tokens)
        most = max(len(self.waiting(each)) for each in "abn")
        full, evens_out = len(self.model) == LIMIT, most >= len(self.waiting(flow)) + 2
        try:
            displaced = push(self.queue, new, self.now)
        except QueueFull:
            assert full
            assert not evens_out
            return
        if full:
            assert evens_out
            assert displaced is not None
            own = self.waiting(displaced.id[0])
            assert len(own) == most
            assert own[-1] == displaced.id
            assert self.queue.cancel([displaced.id])
            self.forget([displaced.id])
        else:
            assert displaced is None
        self.model.append((new.id, self.now))

    def forget(self, ids: list[str]) -> None:
        self.model = [entry for entry in self.model if entry[0] not in ids]
        self.gone += ids

    @rule(count=st.integers(0, LIMIT + 1))
    def take(self, count: int) -> None:
        promised = self.queue.waiting(count)
        taken = self.queue.pop(count)
        assert tuple(taken) == promised
        assert len(taken) == min(count, len(self.model))
        for flow in "abn":
            own = [entry.id for entry in taken if entry.id[0] == flow or not self.fair]
            assert own == self.waiting(flow)[: len(own)]
        assert {(entry.id, entry.arrived) for entry in taken} <= set(self.model)
        self.forget([entry.id for entry in taken])

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ids = [id for id, _ in self.model]
        some = data.draw(st.lists(st.sampled_from([*ids, *self.gone, "never"])))
        assert self.queue.cancel(some) == {*some} & {*ids}
        self.forget([*({*some} & {*ids})])

    @invariant()
    def same(self) -> None:
        if hasattr(self, "queue"):
            assert len(self.queue) == len(self.model)
            entries = self.queue.waiting(99)
            assert entries is self.queue.waiting(99)
            assert sorted((entry.id, entry.arrived) for entry in entries) == sorted(self.model)
            assert self.queue.first_arrival == (self.model[0][1] if self.model else None)
            assert len(set(self.gone)) == len(self.gone)


TestQueueAgainstLists = QueueAgainstLists.TestCase


def of_class(id: str, *, batch: bool, adapter: str | None = None) -> Generate:
    slo = Slo(ttft=60.0 if batch else 1.0, tpot=0.1, batch=batch)
    return msgspec.structs.replace(request(id, adapter), slo=slo)


def push_classes(queue: InferenceQueue, classes: str, arrived: float = 0.0) -> None:
    for number, name in enumerate(classes):
        one = of_class(f"{name}{number}", batch=name == "b")
        assert push(queue, one, arrived) is None


def test_interactive_requests_go_first() -> None:
    queue = InferenceQueue(9, fair=True)
    push_classes(queue, "bibi")
    assert [entry.id for entry in queue.waiting(3)] == ["i1", "i3", "b0"]
    assert [queue.ahead(queue.waiting(4)[at]) for at in (1, 3)] == [1, 3], "the newest of both classes"
    assert ids(queue, 1) == ["i1"]
    push(queue, of_class("new", batch=False), 59.5)
    assert ids(queue) == ["i3", "new", "b0", "b2"], "though the batch's first is due before"
    strict = InferenceQueue(9, fair=False)
    push_classes(strict, "bibi")
    assert ids(strict) == ["b0", "i1", "b2", "i3"]


def test_of_the_class_batch_one_that_is_due_goes_after_every_fourth_interactive_request() -> None:
    queue = InferenceQueue(99, fair=True)
    push_classes(queue, "bbbb")
    push_classes(queue, "." * 9, arrived=59.5)
    due = [0, 1, 2, 3, "b0", 4, 5, 6, 7, "b1", 8, "b2", "b3"]
    assert [entry.id.removeprefix(".") for entry in queue.waiting(99)] == [str(each) for each in due]
    for count in (2, 4, 7):  # those that were admitted count
        popped = ids(queue, count)
        assert popped == [f".{each}" if isinstance(each, int) else each for each in due[:count]]
        due = due[count:]


def test_a_backlog_of_the_class_batch_does_not_hold_up_an_interactive_request() -> None:
    queue = InferenceQueue(99, fair=True)
    push_classes(queue, "b" * 50)
    assert len(queue.pop(5)) == 5
    push_classes(queue, "i", arrived=100.0)
    assert queue.waiting(1)[0].id == "i0", "who arrived 100 s later"


@pytest.mark.parametrize("classes", ["bbbb", "bibi", "iiii", ""])
@pytest.mark.parametrize("batch", [0, 1, 9])
def test_few_of_the_class_batch_are_taken(classes: str, batch: int) -> None:
    queue = InferenceQueue(9, fair=True)
    push_classes(queue, classes)
    order = [entry.id for entry in queue.waiting(99)]
    assert queue.batch_waits == ("b" in classes)
    for count in (2, 9):
        left = [id for id in order if id[0] == "i"] + [id for id in order if id[0] == "b"][:batch]
        promised = [entry.id for entry in queue.waiting(count, batch)]
        assert promised == left[:count]
        assert [entry.id for entry in queue.pop(count, batch)] == promised
        order = [id for id in order if id not in promised]
        batch -= sum(id[0] == "b" for id in promised)
    assert [entry.id for entry in queue.waiting(99)] == order


def test_the_class_batch_is_not_first_because_it_is_due_later() -> None:
    queue = InferenceQueue(99, fair=True)
    push_classes(queue, "b")
    push_classes(queue, "." * 6)
    assert ids(queue)[-1] == "b0"


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.integers(0, 6), st.integers(1, 600)), max_size=20),
    st.integers(0, 6),
)
def test_how_many_are_ahead_of_the_newest_of_a_line(arrivals: list[tuple[bool, str, int, int]], left: int) -> None:
    """Counted, and found by listing all."""
    queue = InferenceQueue(99, fair=True)
    newest: dict[tuple[bool, str], Request] = {}
    for number, (batch, adapter, due, tokens) in enumerate(arrivals):
        one = request(f"r{number}", adapter, max_tokens=tokens)
        one = msgspec.structs.replace(one, slo=msgspec.structs.replace(one.slo, batch=batch, ttft=float(due)))
        newest[batch, adapter] = waiting = Request(one)
        queue.push(waiting)
    queue.pop(left)
    order = [entry.id for entry in queue.waiting(99)]
    for one in newest.values():
        if one.id in order:
            at = order.index(one.id)
            assert queue.ahead(one) == at
            assert queue.ahead(one, order[:2]) == at - len(order[: min(2, at)])


def test_in_a_full_queue_the_class_batch_gives_way() -> None:
    queue = InferenceQueue(3, fair=True)
    push_classes(queue, "ibb")
    displaced = push(queue, of_class("new", batch=False), 1.0)
    assert displaced is not None and displaced.id == "b2" and queue.cancel(["b2"])
    with pytest.raises(QueueFull):
        push(queue, of_class("b9", batch=True, adapter="other"), 1.0)
    assert queue.cancel(["b1"])
    assert push(queue, of_class("more", batch=False, adapter="x"), 1.0) is None
    with pytest.raises(QueueFull):
        push(queue, of_class("b9", batch=True), 1.0)
    assert sorted(ids(queue)) == ["i0", "more", "new"]


def measured(gap: float, count: int = 4) -> QueueSpeed:
    """A full batch has taken a request each `gap` seconds, the last one at `(count - 1) * gap`, and others wait."""
    speed = QueueSpeed()
    speed.began_to_wait()
    for number in range(count):
        speed.admitted(1, gap * number, others_wait=True)
    return speed


def test_the_wait_grows_with_those_ahead() -> None:
    speed = measured(0.5)
    assert speed.gap == pytest.approx(0.5)
    assert [speed.wait(ahead, 1.5, full=True) for ahead in (0, 1, 9)] == [
        pytest.approx(0.25),
        pytest.approx(0.75),
        pytest.approx(4.75),
    ]


def test_how_long_the_batch_has_taken_nobody_tells_its_speed() -> None:
    """Also before anybody who waited was admitted."""
    assert measured(0.5).wait(0, 9.5, full=True) > 0.5
    unknown = measured(0.0, count=1)
    assert unknown.gap == 0
    assert unknown.wait(1, 4.0, full=True) == pytest.approx(6.0)
    assert unknown.wait(1, 4.0, full=False) == 0, "it is not the batch that they wait for"


def test_the_speed_is_that_of_the_requests_that_wait_now() -> None:
    """Long answers gave a place each 5 s; then the queue was empty."""
    speed = measured(5.0)
    speed.began_to_wait()
    assert speed.gap == 0


def test_what_a_policy_holds_back_tells_no_speed() -> None:
    speed = QueueSpeed()
    speed.admitted(0, 0.0, others_wait=False)
    speed.admitted(1, 0.05, others_wait=False)
    assert speed.gap == 0


def test_idle_time_is_no_time_between_admissions() -> None:
    speed = QueueSpeed()
    for now in (0.0, 10.0, 20.0):
        speed.began_to_wait()
        speed.admitted(1, now, others_wait=False)
    assert speed.gap == 0


def test_later_admissions_count_more() -> None:
    speed = measured(1.0)
    for number in range(200):
        speed.admitted(1, 3.0 + 0.1 * (number + 1), others_wait=True)
    assert speed.gap == pytest.approx(0.1, rel=0.02)
