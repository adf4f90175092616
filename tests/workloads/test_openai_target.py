"""Replays against any server with `/v1/completions`: what is sent, what is counted, what goes wrong."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from coserve.workloads.distributions import Lengths
from coserve.workloads.gauges import read_snapshot
from coserve.workloads.openai_target import OpenAITarget
from coserve.workloads.replay import ReplayResult, Rest, replay
from coserve.workloads.scenario import Scenario
from coserve.workloads.summary import summarise
from coserve.workloads.synthesis import make_trace
from tests.support.fake_openai import BASE, FakeOpenAI, serve_openai

SCENARIO = Scenario(
    duration=0.2,
    rate=30,
    adapters=2,
    prompt_lengths=Lengths.UNIFORM,
    min_prompt_tokens=3,
    max_prompt_tokens=9,
    min_tokens=5,
    max_tokens=5,
    finetune_rows=0,
    temperature=0.0,
)
NAMES = (BASE, "load-00", "load-01")


def play(server: FakeOpenAI, scenario: Scenario = SCENARIO, **options: object) -> ReplayResult:
    async def main() -> ReplayResult:
        async with serve_openai(server), OpenAITarget(server.url, model=BASE, **options) as target:
            trace = make_trace(scenario, ["one two three"], [])
            return await replay(trace, target, rest=Rest.LEAVE, probe=target.probe, probe_interval=0.05)

    return asyncio.run(main())


def test_prompts_lengths_and_adapters_are_those_of_the_trace() -> None:
    server = FakeOpenAI(NAMES)
    run = play(server)
    prompts = make_trace(SCENARIO, ["p"], []).prompts
    assert sorted((body["model"], tuple(body["prompt"])) for body in server.bodies) == sorted(
        (prompt.adapter or BASE, prompt.prompt) for prompt in prompts
    )
    for body in server.bodies:
        assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["temperature"]) == (5, True, True, 0)
        assert "seed" not in body, "greedy"
    assert [sample.error for sample in run.samples] == [None] * len(prompts)
    assert [sample.prompt_tokens for sample in run.samples] == [len(prompt.prompt) for prompt in prompts]
    assert {(snapshot.waiting, snapshot.running, snapshot.cache) for snapshot in run.snapshots} == {(3.0, 2.0, 0.25)}


@pytest.mark.parametrize(
    ("per_chunk", "usage", "chunks", "tokens"),
    [(1, "running", 5, 5), (2, "running", 3, 5), (2, "end", 3, 5), (1, "none", 5, 5), (2, "none", 3, 3)],
)
def test_tokens_are_counted_as_the_server_counts_them(per_chunk: int, usage: str, chunks: int, tokens: int) -> None:
    run = play(FakeOpenAI(NAMES, per_chunk=per_chunk, usage=usage))
    assert {(sample.tokens, sample.error) for sample in run.samples} == {(tokens, None)}
    if usage == "running":
        assert {len(sample.times) for sample in run.samples} == {chunks}
    assert (summarise(run).prompt_tokens is None) == (usage == "none")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "invalid_request"),
        (401, "unauthorized"),
        (429, "queue_full"),
        (500, "internal_error"),
        (503, "engine_unavailable"),
    ],
)
def test_a_status_is_an_error_of_its_request(status: int, code: str) -> None:
    assert {sample.error for sample in play(FakeOpenAI(NAMES, status=status)).samples} == {code}


@dataclass
class Refusing(FakeOpenAI):
    """Answers with `status` and the JSON `content`."""

    content: dict[str, Any] = field(default_factory=dict)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.content, status=self.status)


@pytest.mark.parametrize(
    ("status", "content", "code", "message"),
    [
        (429, {"error": {"code": "overloaded", "message": "too\nslow"}}, "overloaded", "status 429: too slow"),
        (429, {"error": {"code": "quota_exceeded", "message": "m"}}, "quota_exceeded", "status 429: m"),
        (429, {"error": {"code": "rate_limit_exceeded", "message": "m"}}, "queue_full", "status 429: m"),
        (429, {"error": {"code": 429, "message": "m"}}, "queue_full", "status 429: m"),
        (429, {"detail": "m"}, "queue_full", 'status 429: {"detail": "m"}'),
        (503, {"error": {"code": "out_of_memory", "message": "m"}}, "out_of_memory", "status 503: m"),
        (404, {"error": {"code": "model_not_found", "message": "m"}}, "adapter_not_found", "status 404: m"),
        (400, {"error": {"code": "overloaded", "message": "m"}}, "invalid_request", "status 400: m"),
        (400, {"object": "error", "message": "too long", "code": 400}, "invalid_request", "status 400: too long"),
        (400, {"error": "[/b] \x1b[31m"}, "invalid_request", 'status 400: {"error": "[/b] \\u001b[31m"}'),
    ],
)
def test_the_code_in_the_body_goes_before_that_of_the_status(
    status: int, content: dict[str, Any], code: str, message: str
) -> None:
    run = play(Refusing(NAMES, status=status, content=content))
    assert {(sample.error, sample.message) for sample in run.samples} == {(code, message)}
    assert summarise(run).shed == (len(run.samples) if status == 429 else 0)


def test_an_unknown_adapter_a_broken_stream_and_a_server_without_gauges() -> None:
    run = play(FakeOpenAI((BASE,), metrics=False))
    assert {sample.error for sample in run.samples} == {"adapter_not_found"} and run.snapshots == ()
    broken = play(FakeOpenAI(NAMES, cut_after=2))
    assert {(sample.error, sample.tokens) for sample in broken.samples} == {("unreachable", 2)}


def test_a_sampled_request_has_its_seed_and_a_prefix_its_adapter() -> None:
    server = FakeOpenAI((BASE, "x-load-00"))
    scenario = Scenario(duration=0.05, rate=30, adapters=1, finetune_rows=0, max_tokens=2)
    run = play(server, scenario, temperature=1.0, prefix="x-")
    assert [body["seed"] for body in server.bodies] == [
        prompt.seed for prompt in make_trace(scenario, ["p"], []).prompts
    ]
    assert {sample.error for sample in run.samples} == {None}


def test_gauges_of_coserve_go_before_those_in_vllms_names() -> None:
    page = """# HELP coserve_num_requests_waiting Sequences in the queue
coserve_num_requests_waiting 4
coserve_num_requests_running 8
coserve_kv_cache_usage_ratio 0.5
coserve_memory_peak_bytes 1e9
coserve_memory_planned_bytes{kind="torch"} 2e9
vllm:num_requests_waiting{model_name="x"} 4.5
vllm:e2e_request_latency_seconds_bucket{le="0.5"} 3
"""
    snapshot = read_snapshot(page, 2.0)
    assert (snapshot.at, snapshot.waiting, snapshot.running, snapshot.cache, snapshot.jobs) == (2.0, 4, 8, 0.5, None)
    assert snapshot.memory == {"peak": 1e9, "planned": 2e9}
    assert read_snapshot("", 0.0).waiting is None
