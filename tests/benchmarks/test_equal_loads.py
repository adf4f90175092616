"""Cells, keys and the figure of the equal loads, and the clients' parts of a run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks.peers.always import Jobs
from benchmarks.peers.client import merged
from benchmarks.peers.device_time import Window, counters_of, device_time, read_counters
from benchmarks.peers.equal_report import FILE, TARGETS, keys, peer_system, publish, target_of
from benchmarks.peers.loads import chosen_cells, only_prompts, scenario_of
from coserve.api.http.security import Handler
from coserve.core.errors import WrongJobState
from coserve.core.training.settings import TrainingSettings
from coserve.workloads.opening import open_workload
from coserve.workloads.replay import ReplayResult, Sample
from tests.support.api_server import leap, serve_api


def row(rate: float, in_slo: float, goodput: float, share: float = 0.0) -> dict[str, Any]:
    found = {"rate": rate, "in_slo": in_slo, "in_slo_strict": 0.5, "goodput": goodput, "date": "2026-11-22"}
    return found | {"finetune_share": share, "finetune_tok_s": 1e4 * share, "ttft_ms": {"p50": 50.0}, "value": in_slo}


ROWS = {
    "r40.alone": row(40, 1.0, 40.0),
    "r80.alone": row(80, 0.6, 48.0),
    "r5.coserve": row(5, 1.0, 5.0, 0.9),
    "r5.strict.coserve": row(5, 0.98, 4.9, 0.6),
    "r20.coserve": row(20, 1.0, 20.0, 0.7),
    "r60.coserve": row(60, 0.75, 45.0, 0.04),
    "flexllm.r5.coserve": row(5, 1.0, 5.0, 0.1),
    "r5.vllm+peft": row(5, 0.8, 4.0, 0.5),
    "peak.coserve": row(0, 1.0, 0.0),
}


def test_systems_get_the_same_prompts_whatever_the_limits() -> None:
    of = {cell.name: cell for cell in chosen_cells("coserve", tiny=False)}
    loose, strict = (open_workload(scenario_of(of[name], tiny=False)).prompts for name in ("r5", "r5.strict"))
    assert loose == strict and of["r5"].trace == of["r5.strict"].trace
    peers = {cell.name: cell for cell in chosen_cells("vllm+peft", tiny=False)}
    assert all(of[name] == cell for name, cell in peers.items()) and {"r5", "r20", "flexllm.r1"} <= set(peers)


def test_jobs_checkpoint_and_end_as_the_preset_says() -> None:
    trace = open_workload(scenario_of(chosen_cells("coserve", tiny=False)[0], tiny=False))
    training = trace.scenario.training
    assert (training.steps, training.checkpoint_steps, training.batch_tokens) == (25, 20, 4096)
    assert not only_prompts(trace).finetunes


def test_efficiency_is_the_share_and_what_is_served_of_the_most() -> None:
    found = {key: value for key, (value, _, _) in keys(ROWS).items()}
    assert found["coserve.served_alone"] == 48.0
    assert found["coserve.efficiency.r5"] == pytest.approx(0.9 + 5 / 48, abs=1e-4)
    assert found["coserve.efficiency.min"] == found["coserve.efficiency.r60"] == pytest.approx(0.04 + 45 / 48, abs=1e-4)
    assert found["coserve.ft_share.min"] == 0.04, "strict limits and other recipes are not of the curve"
    assert found["coserve.slo_strict.r5"] == 0.98 and found["coserve.flexllm.ft_share.r5"] == 0.1
    assert found["peers.slo.r5"] == 0.8 and found["peers.slo_strict.r5"] == 0.5 and "peers.slo.r20" not in found


def test_training_at_equal_attainment() -> None:
    """The most among the peer's shares and duty cycles at which 99% of the requests are in time; 0 where none is."""
    names = [peer_system(*each) for each in ((None, 1.0), (None, 0.5), (50, 1.0), (25, 0.5))]
    assert names == ["vllm+peft", "vllm+peft@d0.5", "vllm+peft@mps50", "vllm+peft@mps25.d0.5"]
    points = ((0.2, 0.9), (0.995, 0.3), (0.99, 0.4), (1.0, 0.2))
    swept = {f"r5.{name}": row(5, *point[:1], 5.0, point[1]) for name, point in zip(names, points, strict=True)}
    found = {key: value for key, (value, _, _) in keys(ROWS | swept).items() if "equal_attainment" in key}
    assert found["peers.equal_attainment.r5"] == 4e3 and found["peers.equal_attainment.r5.coserve"] == 9e3
    assert found["peers.equal_attainment.r5.strict"] == 0.0


def test_without_a_capacity_there_is_no_efficiency() -> None:
    assert not any("efficiency" in key for key in keys({"r5.coserve": ROWS["r5.coserve"]}))


def test_the_figure_is_drawn_and_keys_have_their_targets(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"rows": ROWS, "runs": {"a": {"hardware": "a GPU"}}}))
    publish(tmp_path, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {key: summary[key]["target"] for key in TARGETS if key in summary} == {
        key: str(TARGETS[key]) for key in TARGETS if key in summary
    }
    assert summary["coserve.efficiency.min"]["target"] == ">= 1"


def test_parts_of_a_run_are_one_run_in_order() -> None:
    scenario = open_workload({"duration": 1.0}).scenario

    def part(duration: float, *indices: int) -> ReplayResult:
        samples = (
            Sample(index=i, adapter=None, due=0.1 * i, sent=0.1 * i, times=(1.0,), tokens=1, finished=1.0)
            for i in indices
        )
        return ReplayResult(scenario=scenario, duration=duration, samples=tuple(samples), jobs=())

    whole = merged([part(2.0, 0, 2), part(3.0, 1)])
    assert [sample.index for sample in whole.samples] == [0, 1, 2] and whole.duration == 3.0


def test_each_policy_has_keys_of_its_own() -> None:
    rows = ROWS | {key.replace("coserve", "coserve.overlap"): row for key, row in ROWS.items() if "coserve" in key}
    found = keys(rows)
    for key, (value, unit, _) in keys(ROWS).items():
        if key.startswith("peers") or key == "coserve.served_alone":
            continue
        assert found[key][:2] == (value, unit), key
        own = key.replace("coserve", "coserve.overlap")
        assert found[own][:2] == (value, unit), own
        assert target_of(own, rows) == target_of(key, rows) == TARGETS.get(key)


def test_where_the_time_of_the_device_goes() -> None:
    def page(decodes: int, prompts: int, slices: float) -> str:
        return "\n".join(
            f"coserve_{name} {value}"
            for name, value in (
                ('generation_steps_total{kind="decode",beside_training="true"}', decodes),
                ('generation_step_seconds_total{kind="decode",beside_training="true"}', 0.02 * decodes),
                ('generation_steps_total{kind="prefill",beside_training="false"}', prompts),
                ('generation_step_seconds_total{kind="prefill",beside_training="false"}', 0.03 * prompts),
                ("train_seconds_total", slices),
            )
        )

    found = device_time(counters_of(page(100, 5, 3.0), 10.0), counters_of(page(300, 5, 11.0), 20.0))
    assert found == {"train_share": 0.8, "decode.beside": {"per_s": 20.0, "ms": 20.0, "share": 0.4}}


async def test_the_window_is_that_of_the_arrivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = asyncio.Event()

    @web.middleware
    async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if request.path == "/metrics":
            read.set()
        return response

    async with serve_api(tmp_path / "data", middlewares=[watch]) as api:
        window = Window(api.url, 200.0)
        window.begins(time.monotonic() + 100.0)
        await asyncio.sleep(0.01)
        assert not read.is_set()
        leap(monkeypatch, 100.0)
        await read.wait()
        api.engine.stats()
        await api.works()
        leap(monkeypatch, 200.0)
        found = await window.found()
    assert found["decode.beside"] == {
        "per_s": pytest.approx(0.1, rel=0.3),
        "ms": 25.0,
        "share": pytest.approx(0.0025, rel=0.3),
    }


async def test_a_daemons_counters_are_read(tmp_path: Path) -> None:
    async with serve_api(tmp_path / "data") as api:
        api.engine.stats()
        await api.works()
        found = await read_counters(api.url)
    assert found.steps == {"decode.beside": 20, "prefill": 3} and found.seconds == {
        "decode.beside": 0.5,
        "prefill": 0.25,
    }
    assert found.slices == 2.5


class EndedJob:
    """A job that ends while it is cancelled; also the client that submits it."""

    def __init__(self) -> None:
        self.followed = asyncio.Event()

    async def finetune(self, *_: object, **__: object) -> EndedJob:
        return self

    async def events(self) -> AsyncGenerator[object, None]:
        self.followed.set()
        await asyncio.Event().wait()
        yield

    async def cancel(self) -> None:
        raise WrongJobState("the job is succeeded: it cannot become cancelled")


async def test_a_job_that_ends_meanwhile_is_no_failure() -> None:
    job = EndedJob()
    training = asyncio.create_task(Jobs().train(job, "a", [], TrainingSettings()))
    await job.followed.wait()
    training.cancel()
    await asyncio.wait([training])
    assert training.cancelled()
