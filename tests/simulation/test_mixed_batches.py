"""Batches of rows of several jobs under the policies, in virtual time; of 32 rows under ETS, as in the ETS paper
(section 5.2.2)."""

from __future__ import annotations

import pytest

from coserve.core.link.jobs import JobProgress, JobSucceeded, StartJob
from coserve.core.link.link import ToEngine
from coserve.queues.policies.inference_first import InferenceFirst
from coserve.queues.policies.paper import Ets, TemporalSharing
from coserve.queues.policies.slack import Slack
from coserve.queues.policy import Policy
from tests.support.fake_ports import FakePass, JobPlan, Prices
from tests.support.records import make_request
from tests.support.scenario import Outcome, Scenario, job_spec, play

BATCH_ROWS = 32
JOBS, ROWS, STEPS = 8, 8, 6
"""Four jobs fill a batch."""
PRICES = Prices(step=0.2, token=0.0, micro_step=0.5, spikes=0.0)


def outcome(
    policy: Policy, *, batch_rows: int | None = BATCH_ROWS, jobs: int = JOBS, evaluate_every: int | None = 3
) -> Outcome:
    """A request each 0.5 s for 20 s, and `jobs` jobs from the start, which evaluate every so many steps."""
    script: list[tuple[float, ToEngine]] = [(i / 2, make_request(f"r{i}", 2, prompt=1)) for i in range(40)]
    plans = {f"j{i}": JobPlan(STEPS, 4, 2, None, rows=ROWS, evaluate_every=evaluate_every) for i in range(jobs)}
    script += [(0.0, StartJob(spec=job_spec(id))) for id in plans]
    return play(
        Scenario(
            policy=policy,
            script=tuple(sorted(script, key=lambda event: event[0])),
            plans=plans,
            prices=PRICES,
            max_running=8,
            fair=False,
            max_active_jobs=JOBS,
            batch_rows=batch_rows,
        )
    )


def rows(one: FakePass) -> int:
    return sum(own or 0 for own in one.rows.values())


def test_a_batch_of_ets_has_32_rows_of_mixed_adapters_that_came_first() -> None:
    passes = outcome(Ets(8, 2.0), evaluate_every=None).trainer.passes
    assert sum(rows(one) == BATCH_ROWS for one in passes) >= len(passes) - 2, "the first job begins alone"
    assert [min(one.rows) for one in passes] == sorted(min(one.rows) for one in passes)


def test_evaluations_of_ets_are_in_batches_of_their_own() -> None:
    passes = outcome(Ets(8, 2.0)).trainer.passes
    assert sum(rows(one) for one in passes if not one.evaluation) == JOBS * STEPS * ROWS
    evaluations = [one for one in passes if one.evaluation]
    assert len(evaluations) == JOBS * STEPS // 3
    assert all(len(one.rows) == 1 for one in evaluations)


POLICIES = {
    "ets": Ets(8, 2.0),
    "ts": TemporalSharing(2, 8, 2.0),
    "inference-first": InferenceFirst(),
    "slack": Slack(0.5),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_jobs_in_one_batch_advance_alike(policy: Policy) -> None:
    """A batch counts as a turn of each of its jobs."""
    found = outcome(policy, jobs=4)
    assert sum(isinstance(message, JobSucceeded) for _, message in found.messages) == 4
    if not isinstance(policy, (TemporalSharing, Ets)):  # of these, the first job trains first
        done = dict.fromkeys((f"j{i}" for i in range(4)), 0)
        for _, message in found.messages:
            if isinstance(message, JobProgress):
                done[message.id] += 1
                assert max(done.values()) - min(done.values()) <= 2, "the first job starts ahead of the others"


def test_slack_shares_no_batch_whose_micro_steps_fit_between_no_tokens() -> None:
    """A micro-step takes half a second for 32 rows, so that of one job with 8 rows an eighth."""
    free, tight = outcome(Slack(0.5)), outcome(Slack(0.5, tpot=0.35))
    assert max(map(rows, free.trainer.passes)) == BATCH_ROWS
    learned = tight.trainer.passes[8:]
    shared = {len(one.jobs) for one in learned if not one.evaluation}
    assert max(shared) == 2, "two jobs at once take a quarter of a second"


def test_full_batches_take_fewer_turns_than_batches_of_one_job() -> None:
    together, alone = (outcome(Ets(8, 2.0), batch_rows=rows, evaluate_every=None) for rows in (BATCH_ROWS, None))
    assert 2 * len(together.trainer.passes) < len(alone.trainer.passes)
