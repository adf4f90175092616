"""The real tick, queues and policies under thousands of made-up lives, in virtual time.

`COSERVE_SIM_SEEDS=5000` plays more of them, `COSERVE_SIM_SEED=1234` replays one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from coserve.core.link.engine import EngineStopped
from coserve.core.link.generation import Admitted, Generate, RequestFailed, Tokens
from coserve.core.link.jobs import JobProgress, JobStarted, JobSucceeded, StartJob
from coserve.core.link.link import ToEngine
from coserve.core.link.stats import EngineStats
from coserve.queues.policies.slack import Slack
from coserve.queues.policies.spatial import MAX_SLICES
from tests.support.examples import examples, sample
from tests.support.fake_ports import token
from tests.support.scenario import Outcome, Scenario, make_scenario, play

NAMES = ("ets", "ts", "ts-batch", "slack", "inference-first", "spatial", "overlap", "overlap-between")
POLICIES = sample(NAMES, "ets", "ts", "slack", "inference-first", "spatial", "overlap")
FEW = sample(NAMES, "slack", "spatial")
"""For what the policies have in common."""
SEEDS = int(os.environ.get("COSERVE_SIM_SEEDS") or examples(50, fast=8))
MANY = int(os.environ.get("COSERVE_SIM_SEEDS") or examples(100))
"""For what holds of the sum of many lives."""


def seeds(count: int = SEEDS) -> Iterator[int]:
    one = os.environ.get("COSERVE_SIM_SEED")
    yield from range(count) if one is None else [int(one)]


def outcomes(policy: str, *, calm: bool = False, cold: bool = False) -> Iterator[Outcome]:
    """Plays each seed; a failure anywhere names the seed to replay. `play` checks that no decision is made in vain."""
    for seed in seeds():
        try:
            yield play(make_scenario(seed, policy=policy, calm=calm, cold=cold))
        except BaseException as error:
            error.add_note(f"replay with COSERVE_SIM_SEED={seed} ({policy}, calm={calm}, cold={cold})")
            raise


def requests(scenario: Scenario) -> list[Generate]:
    return [message for _, message in scenario.script if isinstance(message, Generate)]


def jobs_only(scenario: Scenario) -> tuple[tuple[float, ToEngine], ...]:
    """The script without users' requests."""
    return tuple(event for event in scenario.script if isinstance(event[1], StartJob))


def check_requests(outcome: Outcome) -> None:
    """Every request ends exactly once; its tokens are its own, in order, each once, and none come after its end."""
    ends = outcome.ends()
    for request in requests(outcome.scenario):
        got = outcome.tokens(request.id)
        assert got == tuple(token(request, t) for t in range(len(got))), request.id
        messages = [message for _, message in outcome.of(request.id)]
        if isinstance(messages[0] if messages else None, Admitted):
            del messages[0]
        assert all(isinstance(message, Tokens | RequestFailed) for message in messages), "admitted at most once, first"
        if request.id in outcome.cancelled:
            assert ends[request.id] <= 1, f"{request.id} ended twice"
        else:
            assert ends[request.id] == 1, f"{request.id} ended {ends[request.id]} times"
            last = messages[-1]
            if isinstance(last, Tokens):
                assert last.finished is not None, f"{request.id} has tokens after its end"
                assert len(got) == request.sampling.max_tokens
            else:
                assert isinstance(last, RequestFailed)
    assert outcome.generator.running == 0 and outcome.generator.pages_used == 0, "pages leaked"


def check_order(outcome: Outcome) -> None:
    """First come, first admitted; if adapters take turns, within each of them."""
    flows = {
        request.id: adapter_of(request) if outcome.scenario.fair else None for request in requests(outcome.scenario)
    }
    admitted = [id for id, _ in sorted(outcome.generator.admitted.items(), key=lambda item: item[1])]
    arrivals = [id for id in outcome.sent if id in outcome.generator.admitted]
    for flow in set(flows.values()):
        assert [id for id in admitted if flows[id] == flow] == [id for id in arrivals if flows[id] == flow]
    assert len(admitted) == len(arrivals)


def adapter_of(request: Generate) -> str | None:
    return None if request.adapter is None else request.adapter.id


def check_jobs(outcome: Outcome) -> None:
    """Every job ends exactly once; its steps are reported in order, and a success is what was published."""
    ends = outcome.ends()
    for _, start in outcome.scenario.script:
        if isinstance(start, StartJob):
            assert ends[start.spec.id] == 1, f"{start.spec.id} ended {ends[start.spec.id]} times"
            check_steps(outcome, start.spec.id)
    reported = [message.id for _, message in outcome.messages if isinstance(message, JobSucceeded)]
    assert reported == outcome.trainer.published, "success is announced for what was published, and for nothing else"
    assert outcome.trainer.active == 0


def check_steps(outcome: Outcome, job: str) -> None:
    due: int | None = None
    for _, message in outcome.of(job):
        if isinstance(message, JobStarted):
            assert due is None or message.resumed_from <= due - 1, f"{job} resumed in the future"
            due = message.resumed_from + 1
        elif isinstance(message, JobProgress):
            assert message.metrics.step == due, f"{job}: step {due} is missing"
            due += 1
        elif isinstance(message, JobSucceeded):
            assert due == outcome.scenario.plans[job].steps + 1


def check_gauges(outcome: Outcome) -> None:
    for _, stats in outcome.messages:
        if isinstance(stats, EngineStats):
            assert 0 <= stats.waiting <= outcome.scenario.max_queue
            assert 0 <= stats.running <= outcome.scenario.max_running
            assert 0 <= stats.jobs <= len(outcome.scenario.plans)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_lost_and_nothing_runs_twice(policy: str) -> None:
    for outcome in outcomes(policy):
        check_requests(outcome)
        check_order(outcome)
        check_jobs(outcome)
        check_gauges(outcome)
        worst, longest = max(outcome.trainer.gaps, default=0.0), outcome.meter.longest
        match policy:
            case "slack":  # no job starves: between two slices lie the patience and the step that ran when it ended
                assert worst <= outcome.scenario.patience + longest["serve"] + 1e-6
            case "spatial":  # the device waits for one generation step and one launch, and is asked for few slices
                assert worst <= longest["serve"] + longest["train"] + 1e-6
                assert outcome.device.in_flight <= MAX_SLICES
        assert isinstance(outcome.messages[-1][1], EngineStopped)


@pytest.mark.parametrize("policy", FEW)
def test_nothing_is_lost_and_nothing_spins_while_adapters_are_read(policy: str) -> None:
    for outcome in outcomes(policy, cold=True):
        check_requests(outcome)
        check_jobs(outcome)


@pytest.mark.parametrize("policy", FEW)
def test_jobs_whose_samples_the_engine_itself_generates_end(policy: str) -> None:
    """A job waits where the next samples are due and the last ones are not there: under no policy do they wait for
    it."""
    for seed in seeds():
        scenario = replace(make_scenario(seed, policy=policy, calm=True), sample_every=1 + seed % 2)
        outcome = play(replace(scenario, script=jobs_only(scenario)) if seed % 3 == 0 else scenario)
        check_requests(outcome)
        check_jobs(outcome)
        assert {id for id in outcome.ends() if "snapshot" in id} or not scenario.plans


@pytest.mark.parametrize("policy", FEW)
def test_below_capacity_no_request_starves_and_training_changes_no_token(policy: str) -> None:
    """With time to breathe, a request waits for its batch to form and for what ran when it came, no longer."""
    for outcome in outcomes(policy, calm=True):
        alone = play(outcome.scenario.without_jobs())
        for request in requests(outcome.scenario):
            assert outcome.tokens(request.id) == alone.tokens(request.id) != ()
        scenario, longest = outcome.scenario, outcome.meter.longest
        batch = 8 * longest["serve"] + 3 * longest["serve"]  # the longest answer, and its prefill
        match policy:
            case "slack":
                bound = 2.0 + longest["train"] + batch  # no first token is due later than 2 s after its arrival
            case "spatial":
                bound = batch + 12 * longest["train"]  # a launch ahead of each step
            case "inference-first":
                bound = longest["train"] + batch
            case "ets":
                bound = scenario.delay + longest["train"] + 2 * batch
            case "ts":
                job = max((plan.steps for plan in scenario.plans.values()), default=0) * longest["train"]
                bound = scenario.delay + 2 * (job + batch)
            case _:
                bound = scenario.delay + 2 * (longest["train"] + batch)
        for id, sent in outcome.sent.items():
            assert outcome.generator.admitted[id] - sent <= bound, id


def missed(outcome: Outcome) -> int:
    """Tokens that came after their promise: a target apart from the first on."""
    count = 0
    for request in requests(outcome.scenario):
        times = [at for at, message in outcome.of(request.id) if isinstance(message, Tokens)]
        count += times[0] > outcome.sent[request.id] + request.slo.ttft + 1e-9
        count += sum(at > times[0] + k * request.slo.tpot + 1e-9 for k, at in enumerate(times))
    return count


def test_slack_keeps_its_promises_while_jobs_train() -> None:
    """Below capacity, with no patience to run out: training costs hardly a deadline, however many micro-steps it runs.

    Hardly: the first steps of a life are taken before anything was measured.
    """
    late = tokens = 0
    for seed in seeds(MANY):
        scenario = make_scenario(seed, policy="slack", calm=True)
        outcome = play(replace(scenario, policy=Slack(patience=1e9)))
        late += missed(outcome)
        tokens += sum(len(outcome.tokens(id)) for id in outcome.sent)
    assert late <= max(4, tokens / 250)


def test_same_seed_same_life() -> None:
    def life(seed: int) -> list[object]:
        return list(play(make_scenario(seed, policy="slack")).messages)

    for seed in range(10):
        assert life(seed) == life(seed)
