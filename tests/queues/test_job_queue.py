"""The fine-tuning queue: round robin at micro-batch boundaries, or a fixed order, while jobs are added and
removed."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coserve.queues.finetune import JobQueue


def test_a_fixed_order_outlasts_turns_and_absences_but_not_a_suspended_batch() -> None:
    queue = JobQueue("abc".index)
    for job in ("c", "a", "b"):
        queue.add(job)
    assert queue.ready() == ("a", "b", "c")
    queue.rotate("a")
    assert queue.ready() == ("a", "b", "c")
    queue.remove("a")  # its next step is being prepared
    queue.put_first(("b",))
    queue.add("a")
    assert queue.ready() == ("b", "a", "c"), "one micro-batch is suspended at a time"
    queue.rotate("b")
    assert queue.ready() == ("a", "b", "c")


class JobsAgainstLists(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = JobQueue()
        self.ready: list[str] = []
        self.made = 0

    @rule()
    def add(self) -> None:
        self.made += 1
        self.queue.add(f"j{self.made}")
        self.ready.append(f"j{self.made}")

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def rotate(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.ready))
        self.queue.rotate(job)
        self.ready.remove(job)
        self.ready.append(job)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.ready))
        self.queue.remove(job)
        self.ready.remove(job)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def put_first(self, data: st.DataObject) -> None:
        jobs = data.draw(st.lists(st.sampled_from(self.ready), unique=True))
        self.queue.put_first(jobs)
        self.ready = [*jobs, *(job for job in self.ready if job not in jobs)]

    @invariant()
    def same(self) -> None:
        assert self.queue.ready() == tuple(self.ready)
        assert len(self.queue) == len(self.ready)
        assert sum(f"j{number}" in self.queue for number in range(self.made + 1)) == len(self.ready)


TestJobsAgainstLists = JobsAgainstLists.TestCase
