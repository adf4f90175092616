"""The load of the ETS paper's table 5.1 under its policies: the trends of its table 5.2. See docs/LOG.md
(Scheduling)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

import pytest

from coserve.core.link.generation import Tokens
from coserve.core.link.jobs import JobProgress, StartJob
from coserve.core.link.link import FromEngine, ToEngine
from coserve.queues.policies.paper import Ets, TemporalSharing, Unit
from coserve.queues.policies.spatial import Spatial
from coserve.queues.policy import Policy
from tests.support.fake_ports import JobPlan, Prices
from tests.support.records import make_request
from tests.support.scenario import Scenario, job_spec, play

SECONDS = 300
BATCH, DELAY = 64, 5.0
STEPS = 4
"""Of a request; all of a batch end together, as in the paper."""
PRICES = Prices(step=1.05 / STEPS, token=2.45 / 53 / STEPS, micro_step=32 * 481.36 / 26_000, spikes=0.0)
"""Fitted to the table's ETS row (`benchmarks/ets/ts_readings.py` at dd244e65)."""


@dataclass(frozen=True)
class Row:
    """Of table 5.2."""

    latency: float
    """Mean seconds from a request's arrival to its end."""
    in_10_s: float
    """Share of the requests."""
    tokens_per_s: float
    """Of fine-tuning, while requests arrive."""


def scenario(policy: Policy, rows: int, share: float | None = None) -> Scenario:
    """A request each 0.1 s, and each 20 s a job of `rows` rows in batches of 32. `share`: see `Scenario`."""
    script: list[tuple[float, ToEngine]] = [
        (i / 10, make_request(f"r{i}", STEPS, prompt=1)) for i in range(10 * SECONDS)
    ]
    plans = {f"j{i}": JobPlan(rows // 32, 1, 1 << 20, None) for i in range(SECONDS // 20)}
    script += [(20.0 * i, StartJob(spec=job_spec(id))) for i, id in enumerate(plans)]
    return Scenario(
        policy=policy,
        script=tuple(sorted(script, key=lambda event: event[0])),
        plans=plans,
        prices=PRICES,
        max_running=BATCH,
        fair=False,
        max_active_jobs=4,
        share=share,
    )


def row(policy: Policy, rows: int, share: float | None = None) -> Row:
    outcome = play(scenario(policy, rows, share))
    latencies = [at - outcome.sent[message.id] for at, message in outcome.messages if _finished(message)]
    assert len(latencies) == 10 * SECONDS
    batches = sum(isinstance(message, JobProgress) and at <= SECONDS for at, message in outcome.messages)
    return Row(mean(latencies), sum(each <= 10 for each in latencies) / len(latencies), 32 * 481.36 * batches / SECONDS)


def _finished(message: FromEngine) -> bool:
    return isinstance(message, Tokens) and message.finished is not None


@cache
def ets(rows: int = 512) -> Row:
    return row(Ets(BATCH, DELAY), rows)


@cache
def ts(n: int, unit: Unit = "request", rows: int = 512) -> Row:
    return row(TemporalSharing(n, BATCH, DELAY, unit), rows)


def test_ets_keeps_all_requests_within_10_s() -> None:
    """The paper: 6.18 s, 100%, 9,071 tokens/s. The prices are fitted to these."""
    assert 5.9 < ets().latency < 6.5 and ets().in_10_s == 1.0
    assert 8_500 < ets().tokens_per_s < 9_600


@pytest.mark.parametrize("policy", [Ets(BATCH, DELAY), TemporalSharing(5, BATCH, DELAY, "batch")])
def test_fine_tuning_requests_are_first_come_first_served(policy: Policy) -> None:
    """Algorithm 1: a queue of batches, into which an arrival inserts all batches of its request."""
    both = scenario(policy, 128)
    jobs = [(0.0, StartJob(spec=job_spec(id))) for id in ("j0", "j1")]
    outcome = play(replace(both, script=(*jobs,), plans={id: both.plans[id] for id in ("j0", "j1")}))
    trained = [message.id for _, message in outcome.messages if isinstance(message, JobProgress)]
    assert trained == [*["j0"] * 4, *["j1"] * 4]


@pytest.mark.slow
def test_temporal_sharing_lets_requests_wait_for_a_whole_fine_tuning_request() -> None:
    """The paper: TS(10) 12.96 s, 25% within 10 s; TS(20) 12.85 s, 26%: n does not bind."""
    assert ts(10) == ts(20)
    assert 1.5 * ets().latency < ts(20).latency < 14
    assert 0.2 < ts(20).in_10_s < 0.6


@pytest.mark.slow
def test_few_batches_a_turn_let_the_queue_grow_and_train_more() -> None:
    """The paper: TS(5) 38.98 s, none within 10 s, and the most fine-tuning (12,324 tokens/s)."""
    assert ts(5).latency > 1.5 * ts(10).latency
    assert ts(5).in_10_s < 0.2
    assert ts(5).tokens_per_s > max(ets().tokens_per_s, ts(10).tokens_per_s)


@pytest.mark.slow
def test_spatial_sharing_gives_each_side_its_part_whatever_the_other_does() -> None:
    """With a quarter of the device for training, answers are faster than under ETS, and training has a quarter of its
    speed alone but for the waits for results, which here are steps of a second. With half of it answers are far slower,
    though training does not need it all: the parts are fixed."""
    alone = 32 * 481.36 / PRICES.micro_step
    quarter, half = (row(Spatial(), 512, share) for share in (0.25, 0.5))
    assert 0.65 < quarter.tokens_per_s / (0.25 * alone) <= 1
    assert quarter.latency < ets().latency and quarter.in_10_s == 1.0
    assert half.tokens_per_s > 1.5 * quarter.tokens_per_s and half.latency > 2 * ets().latency


@pytest.mark.slow
def test_latency_grows_with_the_size_of_fine_tuning_requests_under_temporal_sharing_alone() -> None:
    """Figure 5.2."""
    assert abs(ets(128).latency - ets(512).latency) < 0.5
    assert ts(10, rows=128).latency + 1 < ts(10, rows=256).latency + 0.5 < ts(10).latency


@pytest.mark.slow
def test_turns_of_single_batches_are_not_what_the_table_shows() -> None:
    """With as many requests as here, no n binds: TS would be ETS."""
    assert ts(5, "batch") == ts(20, "batch")
    assert abs(ts(5, "batch").latency - ets().latency) < 0.5
