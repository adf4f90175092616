"""Numbers from samples, against slow and obvious references."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.types import JobState
from coserve.workloads.metrics import Limits, attainment, attains, spread, trained_until
from coserve.workloads.replay import JobSample, ReplayResult, Sample
from coserve.workloads.scenario import Scenario
from coserve.workloads.summary import summarise


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
    assert summary.goodput == pytest.approx(0.1)


def test_failed_requests_have_no_latency_and_keep_no_slo() -> None:
    samples = [sample(2.0, 3.0), sample(2.0, error="queue_full"), sample(error="timeout"), sample(error="timeout")]
    summary = summarise(run(samples, []))
    assert (summary.requests, summary.completed) == (4, 1)
    assert summary.errors == {"queue_full": 1, "timeout": 2}
    assert summary.slo_attainment == {"10": 0.25, "60": 0.25}
    assert summary.e2e and summary.e2e.count == 1
    assert summary.output_tokens == 2


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (Limits(), True),
        (Limits(ttft=0.5, tpot=0.3, e2e=1.1001), True),
        (Limits(ttft=0.4), False),
        (Limits(tpot=0.29), False),
        (Limits(e2e=1.0), False),
    ],
)
def test_an_answer_is_good_if_it_keeps_every_limit(limits: Limits, kept: bool) -> None:
    assert attains(sample(1.5, 1.7, 2.0999), limits) is kept


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


@given(st.lists(st.floats(0.01, 100), max_size=30), st.integers(0, 5), st.floats(0.01, 100), st.floats(0.01, 100))
def test_attainment_is_a_share_that_grows_with_the_limit(ends: list[float], failed: int, a: float, b: float) -> None:
    samples = [sample(end, due=0.0) for end in ends] + [sample(error="timeout")] * failed
    low, high = sorted((a, b))
    of = {limit: attainment(samples, Limits(e2e=limit)) for limit in (low, high)}
    assert 0 <= of[low] <= of[high] <= 1
    if samples:
        assert of[low] == sum(end <= low for end in ends) / len(samples)
