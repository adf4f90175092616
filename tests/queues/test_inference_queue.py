"""The inference queue against a plain list: first come first, bounded, nothing lost, nothing twice."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coserve.errors import QueueFull
from coserve.link import Generate
from coserve.queues.inference import InferenceQueue
from coserve.types import SamplingParams, Slo

LIMIT = 5


def request(id: str) -> Generate:
    return Generate(id=id, prompt=(1,), sampling=SamplingParams(), adapter=None, slo=Slo(ttft=1.0, tpot=0.1))


def test_full_queue_says_when_to_come_back() -> None:
    queue = InferenceQueue(2)
    queue.push(request("a"), arrived=0.0, deadline=1.0)
    queue.push(request("b"), arrived=1.0, deadline=2.0)
    for now, seconds in [(1.5, 1.5), (0.1, 1.0), (1000.0, 30.0)]:
        with pytest.raises(QueueFull, match="2 requests") as caught:
            queue.push(request("c"), arrived=now, deadline=now)
        assert caught.value.retry_after == seconds
    assert [entry.message.id for entry in queue.take(9)] == ["a", "b"]
    assert queue.first_arrival is None


class QueueAgainstList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = InferenceQueue(LIMIT)
        self.model: list[tuple[str, float]] = []
        self.gone: list[str] = []
        self.now = 0.0
        self.made = 0

    @rule(later=st.integers(0, 3))
    def push(self, later: int) -> None:
        self.now += later
        self.made += 1
        id = f"r{self.made}"
        try:
            self.queue.push(request(id), arrived=self.now, deadline=self.now + 2)
        except QueueFull:
            assert len(self.model) == LIMIT
        else:
            self.model.append((id, self.now))

    @rule(count=st.integers(0, LIMIT + 1))
    def take(self, count: int) -> None:
        taken = [(entry.message.id, entry.arrived) for entry in self.queue.take(count)]
        assert taken == self.model[:count]
        del self.model[:count]
        self.gone += [id for id, _ in taken]

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ids = [id for id, _ in self.model]
        id = data.draw(st.sampled_from([*ids, *self.gone, "never"]))
        assert self.queue.cancel(id) == (id in ids)
        self.model = [entry for entry in self.model if entry[0] != id]

    @invariant()
    def same(self) -> None:
        assert len(self.queue) == len(self.model)
        assert [(entry.message.id, entry.arrived) for entry in self.queue.waiting()] == self.model
        assert self.queue.first_arrival == (self.model[0][1] if self.model else None)
        assert len(set(self.gone)) == len(self.gone)


TestQueueAgainstList = QueueAgainstList.TestCase
