"""Latency over time and stalls by cause, from samples and Prometheus pages."""

from __future__ import annotations

import pytest

from benchmarks.common.metrics import metric_values
from benchmarks.serving.stall_report import (
    TARGETS,
    allocations,
    check_answers,
    cost,
    key_of,
    latency,
    stalls,
    target,
    timeline,
    trained_tokens,
    worst,
)
from coserve.workloads.replay import Sample


def sample(due: float, *times: float, error: str | None = None, finished: float | None = None) -> Sample:
    return Sample(
        index=0,
        adapter=None,
        due=due,
        sent=due,
        times=times,
        tokens=len(times),
        finished=finished if finished is not None else times[-1],
        error=error,
    )


def test_timeline_puts_waits_where_requests_were_due_and_gaps_where_they_ended() -> None:
    found = timeline([sample(0.5, 3.5, 3.6), sample(0.9, 1.0, 1.2, 4.2), sample(2.1, 2.2)], shift=10.0)
    assert found == [
        [10, 2, 3000.0, 0.0],
        [11, 0, 0.0, 200.0],
        [12, 1, 100.0, 0.0],
        [13, 0, 0.0, 100.0],
        [14, 0, 0.0, 3000.0],
    ]


def test_requests_without_a_token_count_with_the_time_they_waited() -> None:
    found = latency([sample(1.0, 1.1, 1.15), sample(1.0, finished=121.0, error="TimeoutError")])
    assert found["errors"] == {"TimeoutError": 1}
    assert found["ttft_max_ms"] == 120_000.0
    assert found["max_gap_ms"] == 50.0
    assert latency([])["max_gap_ms"] == 0.0


BEFORE = """# TYPE coserve_engine_stall_seconds histogram
coserve_engine_stall_seconds_bucket{cause="gc",le="0.1"} 2.0
coserve_engine_stall_seconds_bucket{cause="gc",le="+Inf"} 2.0
coserve_engine_stall_seconds_count{cause="gc"} 2.0
coserve_engine_stall_seconds_sum{cause="gc"} 0.02
"""
AFTER = """coserve_engine_stall_seconds_bucket{cause="gc",le="0.1"} 2.0
coserve_engine_stall_seconds_bucket{cause="gc",le="+Inf"} 2.0
coserve_engine_stall_seconds_count{cause="gc"} 2.0
coserve_engine_stall_seconds_sum{cause="gc"} 0.02
coserve_engine_stall_seconds_bucket{cause="checkpoint",le="0.1"} 3.0
coserve_engine_stall_seconds_bucket{cause="checkpoint",le="0.5"} 3.0
coserve_engine_stall_seconds_bucket{cause="checkpoint",le="+Inf"} 4.0
coserve_engine_stall_seconds_count{cause="checkpoint"} 4.0
coserve_engine_stall_seconds_sum{cause="checkpoint"} 2.5
coserve_train_tokens_total 4.096e+03
"""


def test_stalls_are_those_between_two_pages() -> None:
    assert stalls(BEFORE, AFTER) == {"checkpoint": {"count": 4.0, "seconds": 2.5, "buckets": {"0.1": 3, "inf": 1}}}
    assert stalls("", BEFORE) == {"gc": {"count": 2.0, "seconds": 0.02, "buckets": {"0.1": 2}}}
    assert stalls("up 1\n", "up 1\n") == {}


def test_metric_values() -> None:
    assert metric_values(AFTER, "coserve_train_tokens_total") == {(): 4096.0}
    assert metric_values(AFTER, "coserve_train_tokens") == {}


def test_failed_requests_are_no_result() -> None:
    good = [sample(0.0, 1.0)] * 199
    check_answers([*good, sample(0.0, 1.0, error="queue_full")])
    with pytest.raises(SystemExit, match="3 of 202 requests failed: adapter_not_found"):
        check_answers([*good, *[sample(0.0, 1.0, error="adapter_not_found")] * 3])


def test_costs_and_targets() -> None:
    assert cost([900.0, 1000.0], [980.0, 1020.0]) == 0.05
    assert cost([], [10.0]) is None is cost([10.0], [0.0])  # not measured
    assert trained_tokens("", AFTER) == 4096.0 and trained_tokens(AFTER, AFTER) == 0.0
    assert worst({"r5": {"max_gap_ms": 3.0}, "r20": {"max_gap_ms": 7.0}}, "max_gap_ms") == 7.0
    assert worst({"r5": {"ft_cost": 0.01}, "r20": {"ft_cost": None}}, "ft_cost") is None
    assert all(str(target(key)).startswith("<= ") for key in TARGETS)
    assert target("start.warm.gap_p50_ms") is None


def test_allocations_are_those_between_two_pages() -> None:
    before = "coserve_engine_cuda_alloc_total 7\ncoserve_engine_pinned_alloc_total 2\n"
    after = "coserve_engine_cuda_alloc_total 7\ncoserve_engine_pinned_alloc_total 5\ncoserve_engine_cuda_free_total 1\n"
    assert allocations(before, after) == {"cuda_alloc": 0, "cuda_free": 1, "cuda_alloc_retries": 0, "pinned_alloc": 3}


def test_keys_name_a_policy_that_was_chosen() -> None:
    assert key_of("stall.jobs.ft_cost", None) == "stall.jobs.ft_cost"
    assert key_of("stall.jobs.ft_cost", "overlap") == "stall.overlap.jobs.ft_cost"
