"""A benchmark leaves nothing behind, however it ends, and says how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coserve.cli.bench.progress import BenchProgress
from coserve.cli.bench.run import Server, run_bench
from coserve.workloads.bundled import bundled_prompts
from coserve.workloads.replay import ReplayResult, Rest
from coserve.workloads.scenario import Scenario
from coserve.workloads.synthesis import make_trace
from coserve.workloads.trace import Trace
from tests.support.api_server import Api
from tests.support.real_server import serve_real

ROWS = [{"text": "one two three four"}]


def trace(rank: int, *, duration: float = 1.0) -> Trace:
    scenario = Scenario(
        duration=duration, rate=4, finetune_period=1, finetune_rows=4, adapters=2, rank=(rank,),
        min_tokens=2, max_tokens=3, steps=2, batch_tokens=16,
    )  # fmt: skip
    return make_trace(scenario, bundled_prompts(), ROWS)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve_real(tmp_path) as server:
        yield server


async def run(api: Api, made: Trace, rest: Rest = Rest.DRAIN) -> ReplayResult:
    return await run_bench(made, rest, Server(url=f"http://127.0.0.1:{api.port}"))


async def nothing_is_left(api: Api) -> None:
    _, adapters = await api.call("GET", "/adapters")
    _, jobs = await api.call("GET", "/finetune")
    assert adapters["data"] == []
    assert all(job["state"] in ("succeeded", "cancelled") for job in jobs["data"])


async def test_runs_of_different_ranks_one_after_the_other_beside_an_adapter_of_that_name(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"adapter": "load-00", "data": ROWS, "lora": {"r": 2}, "training": {"steps": 1}}
    _, job = await api.call("POST", "/finetune", json=body)
    await api.job_until(job["id"], "succeeded")
    for rank in (4, 8):
        result = await run(api, trace(rank))
        assert all(sample.error is None for sample in result.samples) and result.samples
        assert any(job.trained for job in result.jobs)
    _, adapters = await api.call("GET", "/adapters")
    assert [adapter["ref"] for adapter in adapters["data"]] == ["load-00@1"]
    said = capsys.readouterr().err
    assert "requests:" in said and "fine-tuned" in said and "\x1b" not in said


async def test_ctrl_c_cleans_up(api: Api) -> None:
    task = asyncio.create_task(run(api, trace(4, duration=60.0)))
    for _ in range(1000):
        if (await api.call("GET", "/adapters"))[1]["data"]:
            break
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await nothing_is_left(api)


async def test_a_failure_cleans_up(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: BenchProgress, sample: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(BenchProgress, "observe", fail)
    with pytest.raises(ExceptionGroup):
        await run(api, trace(4))
    await nothing_is_left(api)


def test_the_line_says_what_was_sent_and_what_is_left() -> None:
    now = [100.0]
    progress = BenchProgress(trace(4, duration=10.0).scenario, 40, lambda: now[0])
    assert "making the adapters" in progress.line()
    progress.begin()
    progress.sent, progress.answered, progress.tokens = 3, 2, 4321
    now[0] = 104.0
    assert progress.line() == "requests: 3 of 40 sent, 2 answered; fine-tuned 4,321 tokens; 6 s left"
    now[0], progress.failed = 111.0, 1
    assert "1 failed" in progress.line() and "waiting for the last" in progress.line()
