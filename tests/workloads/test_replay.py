"""A replay against a fake daemon in virtual time: open loop, everything noted, nothing lost."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.core.errors import QueueFull, WrongJobState
from coserve.core.training.jobs import JobState
from coserve.workloads.gauges import Snapshot
from coserve.workloads.replay import JobSample, JobUpdate, ReplayResult, Rest, Sample, Usage, replay
from coserve.workloads.scenario import Scenario
from coserve.workloads.synthesis import make_trace
from coserve.workloads.trace import FinetuneArrival, PromptArrival, Trace
from tests.support.examples import examples
from tests.support.virtual_clock import run_virtual


@dataclass
class FakeTarget:
    """First token after `first`, then one every `gap` seconds; a job reports `steps` steps of 100 tokens, 1 s each."""

    first: float = 0.5
    gap: float = 0.1
    steps: int = 3
    refuse: Callable[[int], bool] = lambda index: False
    hang: Callable[[int], bool] = lambda index: False
    open_now: int = 0
    open_most: int = 0
    cancelled: list[str] = field(default_factory=list)

    async def generate(self, arrival: PromptArrival) -> AsyncIterator[int]:
        if self.refuse(arrival.index):
            raise QueueFull("full")
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        try:
            await asyncio.sleep(1e9 if self.hang(arrival.index) else self.first)
            yield 1
            for _ in range(arrival.max_tokens - 1):
                await asyncio.sleep(self.gap)
                yield 1
            yield 0
        finally:
            self.open_now -= 1

    async def submit(self, arrival: FinetuneArrival) -> str:
        if self.refuse(arrival.index):
            raise QueueFull("full")
        return f"job-{arrival.index}"

    async def watch(self, job: str) -> AsyncIterator[JobUpdate]:
        yield JobUpdate(state=JobState.RUNNING)
        for _ in range(self.steps):
            await asyncio.sleep(1)
            yield JobUpdate(tokens=100)
        yield JobUpdate(state=JobState.SUCCEEDED)

    async def cancel(self, job: str) -> None:
        self.cancelled.append(job)
        if job == "job-0":
            raise WrongJobState("it ended")


def trace(*, duration: float = 2.0, rows: int = 0, rate: float = 10.0) -> Trace:
    scenario = Scenario(
        duration=duration, rate=rate, finetune_rows=rows, finetune_period=1.0, adapters=3, min_tokens=4, max_tokens=4
    )
    return make_trace(scenario, ["p"], [{"text": "row"}])


def play(target: FakeTarget, sent: Trace, **options: object) -> ReplayResult:
    return run_virtual(replay(sent, target, **options))


def test_times_of_a_stream() -> None:
    run = play(FakeTarget(), trace())
    assert len(run.samples) == 20
    sample = run.samples[5]
    assert (sample.due, sample.sent) == (pytest.approx(0.5), pytest.approx(0.5))
    assert sample.times == pytest.approx((1.0, 1.1, 1.2, 1.3))
    assert (sample.tokens, sample.error) == (4, None)
    assert sample.finished == pytest.approx(1.3)
    assert run.duration == pytest.approx(1.9 + 0.5 + 0.3)


def test_a_slow_server_does_not_slow_the_arrivals() -> None:
    fast, slow = FakeTarget(first=0.01, gap=0.01), FakeTarget(first=500.0)
    for target in (fast, slow):
        run = play(target, trace())
        assert [sample.sent for sample in run.samples] == pytest.approx([i / 10 for i in range(20)])
    assert (fast.open_most, slow.open_most) == (1, 20)


@given(st.floats(0.001, 30), st.sets(st.integers(0, 14)), st.sets(st.integers(0, 14)), st.sampled_from(Rest))
@settings(max_examples=examples(25), deadline=None)
def test_every_arrival_has_one_sample_whatever_happens(
    first: float, refused: set[int], hung: set[int], rest: Rest
) -> None:
    target = FakeTarget(first=first, refuse=refused.__contains__, hang=hung.__contains__)
    sent = trace(duration=1.5, rows=5)
    seen: list[Sample | JobSample] = []
    run = play(target, sent, request_timeout=40.0, rest=rest, observe=seen.append)
    assert [sample.index for sample in run.samples] == [prompt.index for prompt in sent.prompts]
    assert [job.index for job in run.jobs] == [job.index for job in sent.finetunes]
    assert len(seen) == len(run.samples) + len(run.jobs)
    assert target.open_now == 0
    for sample in run.samples:
        code = "queue_full" if sample.index in refused else "timeout" if sample.index in hung else None
        assert sample.error == code
        assert sample.tokens == len(sample.times) == (0 if code else 4)
        assert sample.sent == pytest.approx(sample.due)
        assert sample.sent <= sample.finished <= run.duration
    for job in run.jobs:
        assert (job.job is None) == (job.error == "queue_full") == (job.index in refused)


def test_drained_jobs_count_to_their_end() -> None:
    run = play(FakeTarget(steps=30), trace(duration=1.0, rows=2))
    assert run.jobs
    assert all(job.state is JobState.SUCCEEDED and len(job.trained) == 30 for job in run.jobs)
    assert run.duration == pytest.approx(30)
    assert run.jobs[0].trained[0] == (pytest.approx(1), 100)


@pytest.mark.parametrize(("rest", "cancels"), [(Rest.CANCEL, True), (Rest.LEAVE, False)])
def test_jobs_that_are_not_awaited_keep_what_was_seen(rest: Rest, cancels: bool) -> None:
    target = FakeTarget(steps=30, first=2.0)
    run = play(target, trace(duration=1.0, rows=2), rest=rest)
    assert run.duration == pytest.approx(0.9 + 2.3)
    assert all(job.state is JobState.RUNNING and len(job.trained) == 3 for job in run.jobs)
    assert target.cancelled == ([job.job for job in run.jobs] if cancels else [])


def test_a_job_that_cannot_be_cancelled_costs_no_sample() -> None:
    class Gone(FakeTarget):
        async def cancel(self, job: str) -> None:
            self.cancelled.append(job)
            raise ConnectionResetError("gone")

    target = Gone(steps=30)
    run = play(target, trace(duration=2.0, rows=5), rest=Rest.CANCEL)
    assert run.samples and len(run.jobs) > 1 and target.cancelled == [job.job for job in run.jobs]


def test_a_job_that_was_never_watched_is_noted_too() -> None:
    sent = trace(duration=1.0, rows=2)
    only_jobs = Trace(scenario=sent.scenario, arrivals=sent.finetunes)
    seen: list[Sample | JobSample] = []
    run = play(FakeTarget(), only_jobs, rest=Rest.LEAVE, observe=seen.append)
    assert [job.index for job in run.jobs] == [job.index for job in sent.finetunes]
    assert all(job.job and not job.trained for job in run.jobs)
    assert len(seen) == len(run.jobs)


def test_an_answer_without_tokens_is_a_failure() -> None:
    class Mute(FakeTarget):
        async def generate(self, arrival: PromptArrival) -> AsyncIterator[int]:
            yield 0

    run = play(Mute(), trace(duration=0.1))
    assert [sample.error for sample in run.samples] == ["no_tokens"]


def test_an_answer_ends_with_what_came_last() -> None:
    class Lingering(FakeTarget):
        async def generate(self, arrival: PromptArrival) -> AsyncIterator[int | Usage]:
            await asyncio.sleep(0.5)
            yield 4
            await asyncio.sleep(0.5)
            yield Usage(prompt_tokens=7, output_tokens=4)
            await asyncio.sleep(5.0)

    (sample,) = play(Lingering(), trace(duration=0.1)).samples
    assert sample.finished == pytest.approx(1.0)


def test_a_broken_connection_is_noted() -> None:
    class Broken(FakeTarget):
        async def generate(self, arrival: PromptArrival) -> AsyncIterator[int]:
            yield 1
            raise ConnectionResetError("gone")

    run = play(Broken(), trace(duration=0.1))
    assert [(sample.error, sample.tokens) for sample in run.samples] == [("connection", 1)]


def test_our_own_faults_are_not_hidden() -> None:
    class Faulty(FakeTarget):
        async def submit(self, arrival: FinetuneArrival) -> str:
            raise KeyError("a bug")

    with pytest.raises(ExceptionGroup):
        play(Faulty(), trace(duration=1.0, rows=2))


def test_gauges_are_asked_for_until_the_last_answer() -> None:
    async def probe(at: float) -> Snapshot:
        if 0.9 < at < 1.1:
            raise QueueFull("not now")
        return Snapshot(at=at, waiting=2.0)

    run = play(FakeTarget(first=3.0, gap=0.0), trace(duration=1.0), probe=probe, probe_interval=1.0)
    assert [snapshot.at for snapshot in run.snapshots] == pytest.approx([0, 2, 3])
    drained = play(FakeTarget(steps=5), trace(duration=1.0, rows=2), probe=probe, probe_interval=1.0)
    assert drained.snapshots[-1].at in (pytest.approx(4), pytest.approx(5)) and drained.duration == pytest.approx(5)
