"""Numbers from samples, against slow and obvious references."""

import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.training.jobs import JobState
from coserve.workloads.gauges import Snapshot
from coserve.workloads.metrics import Limits, satisfaction, spread, trained_until
from coserve.workloads.replay import JobSample, ReplayResult, Sample
from coserve.workloads.scenario import Scenario
from coserve.workloads.summary import Queue, summarise


def sample(*times: float, due: float = 1.0, tokens: int | None = None, error: str | None = None) -> Sample:
    return Sample(
        index=0,
        adapter=None,
        due=due,
        sent=due + 0.001,
        times=times,
        tokens=len(times) if tokens is None else tokens,
        finished=times[-1] if times else due + 1,
        error=error,
    )


def job(*trained: tuple[float, int], state: JobState | None = JobState.SUCCEEDED) -> JobSample:
    return JobSample(index=0, adapter="a", rows=1, due=0, sent=0, job="j", trained=trained, state=state)


def run(samples: list[Sample], jobs: list[JobSample], duration: float = 10.0) -> ReplayResult:
    return ReplayResult(scenario=Scenario(), duration=duration, samples=tuple(samples), jobs=tuple(jobs))


def test_latencies_of_one_answer() -> None:
    summary = summarise(run([sample(1.5, 1.7, 2.1)], []))
    assert summary.ttft and summary.ttft.mean == pytest.approx(0.5)
    assert summary.tpot and summary.tpot.mean == pytest.approx(0.3)
    assert summary.itl and (summary.itl.count, summary.itl.mean) == (2, pytest.approx(0.3))
    assert summary.e2e and summary.e2e.mean == pytest.approx(1.1)
    assert summary.lag and summary.lag.mean == pytest.approx(0.001)


def test_tpot_counts_tokens_and_itl_counts_chunks() -> None:
    summary = summarise(run([sample(2.0, 3.0, tokens=6)], []))
    assert summary.tpot and summary.tpot.mean == pytest.approx(0.2)
    assert summary.itl and summary.itl.mean == pytest.approx(1.0)


def test_one_token_has_no_tpot() -> None:
    summary = summarise(run([sample(2.0)], []), limits=Limits(tpot=0.001))
    assert summary.tpot is None and summary.itl is None
    assert summary.goodput == pytest.approx(0.5)


@pytest.mark.parametrize("lead", [0.0, 30.0])
@pytest.mark.parametrize("drain", [0.0, 60.0])
def test_rates_of_requests_count_neither_the_lead_nor_what_follows_the_last_one(lead: float, drain: float) -> None:
    """100 answers of two tokens, the last one 10 s after the window began."""
    samples = [sample(lead + i / 10 + 0.05, lead + i / 10 + 0.1, due=lead + i / 10) for i in range(100)]
    done = ReplayResult(
        scenario=Scenario(lead=lead, duration=10.0),
        duration=lead + 10.0 + drain,
        samples=tuple(samples),
        jobs=(job((lead + 1.0, 1000)),),
    )
    summary = summarise(done, limits=Limits(e2e=1.0))
    rates = (summary.request_throughput, summary.goodput, summary.output_throughput)
    assert rates == pytest.approx((10.0, 10.0, 20.0))
    assert summary.finetune_window_throughput == pytest.approx(100.0)
    assert summary.finetune_throughput == pytest.approx(1000 / done.duration)


def test_a_request_that_failed_last_counts_into_the_time() -> None:
    summary = summarise(run([sample(2.0), sample(due=7.0, error="timeout")], []))
    assert summary.request_throughput == pytest.approx(1 / 8)


def test_requests_before_the_window_of_a_trace_by_hand_count_into_the_time() -> None:
    early = ReplayResult(scenario=Scenario(lead=30.0), duration=9.0, samples=(sample(5.0, due=1.0),), jobs=())
    assert summarise(early).request_throughput == pytest.approx(1 / 4)


def test_failed_requests_have_no_latency_and_keep_no_slo() -> None:
    samples = [sample(2.0, 3.0), sample(2.0, error="queue_full"), sample(error="timeout"), sample(error="timeout")]
    summary = summarise(run(samples, []))
    assert (summary.requests, summary.completed) == (4, 1)
    assert summary.errors == {"queue_full": 1, "timeout": 2}
    assert summary.slo_attainment == {"10": 0.25, "60": 0.25}
    assert summary.e2e and summary.e2e.count == 1
    assert summary.output_tokens == 2


def test_fine_tuning_counts_what_was_trained_by_the_end() -> None:
    jobs = [job((1.0, 100), (9.0, 50)), job((4.0, 7), (11.0, 1000), state=JobState.RUNNING)]
    summary = summarise(run([], jobs))
    assert (summary.finetune_tokens, summary.finetune_throughput) == (157, pytest.approx(15.7))
    assert (summary.jobs, summary.jobs_succeeded) == (2, 1)
    assert trained_until(jobs, 4.0) == 107


def test_nothing_happened() -> None:
    summary = summarise(run([], [], duration=0.0))
    assert summary.ttft is summary.e2e is summary.lag is None
    assert (summary.request_throughput, summary.goodput, summary.finetune_throughput) == (0, 0, 0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_a_spread_is_in_order_and_inside_its_values(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    tolerance = 1e-9 * max(values)
    assert min(values) - tolerance <= found.p50 <= found.p90 <= found.p95 <= found.p99 <= max(values) + tolerance
    assert found.p50 == pytest.approx(statistics.median(values))
    assert found.mean == pytest.approx(statistics.fmean(values))


# ---- the summary against a slow and obvious reference


def _seconds(least: float, most: float) -> st.SearchStrategy[float]:
    """In sixty-fourths, whose sums are exact: what is at a limit is not above it in one of the two alone."""
    return st.integers(int(least * 64), int(most * 64)).map(lambda number: number / 64)


SAMPLES = st.lists(
    st.builds(
        lambda adapter, due, gaps, failed: Sample(
            index=0,
            adapter=adapter,
            due=due,
            sent=due,
            times=() if failed else tuple(due + sum(gaps[: i + 1]) for i in range(len(gaps))),
            tokens=0 if failed else len(gaps),
            finished=due + sum(gaps),
            error="timeout" if failed else None,
        ),
        st.sampled_from([None, "a", "b"]),
        _seconds(0, 20),
        st.lists(_seconds(1 / 64, 5), min_size=1, max_size=5),
        st.booleans(),
    ),
    max_size=20,
)
LIMITS = st.builds(Limits, **dict.fromkeys(("ttft", "tpot", "e2e"), st.none() | _seconds(1 / 64, 8)))


def is_good(found: Sample, limits: Limits) -> bool:
    if found.error:
        return False
    if limits.ttft is not None and found.times[0] - found.due > limits.ttft:
        return False
    if limits.tpot is not None and found.tokens > 1:
        gaps = [found.times[i + 1] - found.times[i] for i in range(len(found.times) - 1)]
        if sum(gaps) / len(gaps) > limits.tpot:
            return False
    return limits.e2e is None or found.finished - found.due <= limits.e2e


@given(SAMPLES, LIMITS)
def test_a_summary_counts_what_a_loop_counts(samples: list[Sample], limits: Limits) -> None:
    summary = summarise(run(samples, []), limits=limits)
    good = [found for found in samples if is_good(found, limits)]
    seconds = max((found.finished for found in samples), default=1.0)
    assert summary.goodput == pytest.approx(len(good) / seconds)
    assert summary.attainment == (len(good) / len(samples) if samples else 1.0)
    scale = limits.ttft or 6.0
    rewards = [0.0 if f.error else max(0.0, 1 - ((f.times[0] - f.due) / scale) ** 2) for f in samples]
    assert summary.satisfaction == pytest.approx(statistics.fmean(rewards) if samples else 1.0)
    assert {each.adapter for each in summary.adapters} == {found.adapter for found in samples}
    for each in summary.adapters:
        own = [found for found in samples if found.adapter == each.adapter]
        assert each.requests == len(own) and each.completed == sum(found.error is None for found in own)
        assert each.attainment == sum(is_good(found, limits) for found in own) / len(own)
    shares = [each.attainment for each in summary.adapters]
    assert shares == sorted(shares) and summary.worst_attainment == min(shares, default=1.0)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 1000)), max_size=30), st.floats(1, 40), st.floats(1, 40))
def test_fine_tuning_in_the_arrival_window_is_that_of_its_steps(
    steps: list[tuple[float, int]], lead: float, duration: float
) -> None:
    result = ReplayResult(
        scenario=Scenario(lead=lead, duration=duration), duration=100.0, samples=(), jobs=(job(*steps),)
    )
    summary = summarise(result, peak=50.0)
    inside = sum(tokens for at, tokens in steps if lead < at <= lead + duration)
    assert summary.finetune_window_throughput == pytest.approx(inside / duration)
    assert summary.finetune_share == pytest.approx(inside / duration / 50)


@pytest.mark.parametrize(("end", "speed"), [(25.0, 100.0), (60.0, 2500 / 40), (15.0, 0.0)])
def test_a_run_that_ends_before_the_window_does_is_measured_to_its_end(end: float, speed: float) -> None:
    """The last request is answered, or the run interrupted, and no job is watched any longer."""
    steps = [(20.0 + i, 100) for i in range(1, 26) if 20.0 + i <= end]
    scenario = Scenario(lead=20.0, duration=40.0)
    summary = summarise(ReplayResult(scenario=scenario, duration=end, samples=(), jobs=(job(*steps),)), peak=50.0)
    assert summary.finetune_window_throughput == pytest.approx(speed)
    assert summary.finetune_share == pytest.approx(speed / 50)


def test_the_peak_is_the_speed_before_the_window() -> None:
    """Of the second half of the lead, between two steps: a start that takes its time does not count."""
    slow = [(1.0, 10), (9.0, 10)]
    steady = [(10.0 + i, 300) for i in range(1, 11)]
    later = [(21.0, 5000), (22.0, 5000)]
    result = ReplayResult(
        scenario=Scenario(lead=20.0, duration=5.0), duration=30.0, samples=(), jobs=(job(*slow, *steady), job(*later))
    )
    summary = summarise(result)
    assert summary.finetune_peak == pytest.approx(300) and summary.finetune_share == pytest.approx(2000 / 300)
    assert summarise(result, peak=4000.0).finetune_share == pytest.approx(0.5)
    assert summarise(run([], [job(*steady)])).finetune_peak is None


@pytest.mark.parametrize("apart", [0.001, 2.5])
@pytest.mark.parametrize("period", [1.0, 4.0, 16.0])
def test_the_peak_is_that_of_jobs_side_by_side(period: float, apart: float) -> None:
    """Four jobs, which report their steps one soon after the other, or in turn: 40 tokens a second in all."""
    apart = min(apart, period / 4)
    jobs = [job(*((i * period + n * apart, round(10 * period)) for i in range(1, 50))) for n in range(4)]
    found = ReplayResult(scenario=Scenario(lead=40.0), duration=100.0, samples=(), jobs=tuple(jobs))
    assert summarise(found).finetune_peak == pytest.approx(40, rel=0.01)


def test_the_peak_of_jobs_of_one_step_counts_them_whole() -> None:
    jobs = [job((float(at), 300)) for at in range(1, 30)]
    found = ReplayResult(scenario=Scenario(lead=20.0), duration=100.0, samples=(), jobs=tuple(jobs))
    assert summarise(found).finetune_peak == pytest.approx(300)


def test_satisfaction_falls_to_nothing_at_the_limit() -> None:
    answers = [sample(1.0), sample(4.0), sample(7.0), sample(9.0), sample(error="timeout")]
    assert [satisfaction(answer, 6.0) for answer in answers] == [1.0, 0.75, 0.0, 0.0, 0.0]


def test_gauges_of_a_run() -> None:
    snapshots = (
        Snapshot(at=0.0, waiting=1.0, running=4.0, cache=0.25, memory={"peak": 5.0}),
        Snapshot(at=1.0),
        Snapshot(at=2.0, waiting=3.0, running=2.0, cache=0.5, memory={"peak": 7.0}),
    )
    queue = summarise(msgspec.structs.replace(run([], []), snapshots=snapshots)).queue
    assert queue == Queue(
        waiting_mean=2.0,
        waiting_most=3.0,
        running_mean=3.0,
        running_most=4.0,
        cache_most=0.5,
        memory_most={"peak": 7.0},
    )
    assert summarise(run([], [])).queue is None


def test_means_of_gauges_count_neither_the_lead_nor_the_wait_for_jobs() -> None:
    snapshots = [Snapshot(at=float(at), waiting=4.0 * (10 <= at <= 19), running=9.0 * (at == 40)) for at in range(50)]
    result = ReplayResult(
        scenario=Scenario(lead=10.0, duration=5.0),
        duration=50.0,
        samples=(sample(19.0, due=10.0),),
        jobs=(),
        snapshots=tuple(snapshots),
    )
    queue = summarise(result).queue
    assert queue is not None
    assert (queue.waiting_mean, queue.waiting_most, queue.running_mean, queue.running_most) == (4.0, 4.0, 0.0, 9.0)
