"""`/health` and `/health/ready` while the engine starts, serves and is started again, and what they tell an operator of
how it runs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coserve.core.health import RankInfo
from coserve.core.link.engine import EngineNotes, EngineWarming
from coserve.core.link.generation import Generate
from coserve.core.link.stats import Starving
from tests.support.api_server import Api, serve_api
from tests.support.real_server import bundled_base, serve_real


async def probe(api: Api, path: str = "/health/ready") -> tuple[int, str | None, dict[str, Any]]:
    """Status, `Retry-After` and body of a probe."""
    async with api.http.get(path) as response:
        return response.status, response.headers.get("Retry-After"), await response.json()


@pytest.fixture
async def cold(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve_api(tmp_path, engine=False) as api:
        yield api


async def test_not_ready_before_the_first_engine(cold: Api) -> None:
    for path in ("/health", "/health/ready"):
        status, retry, body = await probe(cold, path)
        assert (status, retry, body["status"], body["warming"]) == (503, "2", "starting", None)
    for path, asked in (("/generate", {"prompt": "x"}), ("/finetune", {"adapter": "a", "data": [{"text": "a b"}]})):
        body = await cold.answered(503, "POST", path, json=asked)
        assert body["error"]["code"] == "engine_unavailable"


async def test_a_probe_may_ask_for_headers_alone_and_name_no_host(cold: Api) -> None:
    for path in ("/health", "/health/ready"):
        async with cold.http.head(path) as response:
            assert (response.status, await response.read()) == (503, b"")
        assert (await cold.raw(f"GET {path} HTTP/1.0\r\n\r\n".encode())).startswith(b"HTTP/1.0 503")
    assert (await cold.raw(b"GET /adapters HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.0 403")


def report(done: int, seconds_left: float | None = None) -> EngineWarming:
    return EngineWarming(what="compiling kernels", done=done, total=4, seconds_left=seconds_left)


async def test_a_start_is_told_with_its_progress_and_ends_ready(cold: Api) -> None:
    for done, seconds_left, retry in ((1, None, "2"), (2, 3.2, "4"), (3, 900.0, "10"), (3, 0.0, "1")):
        cold.service.engine.starting(report(done, seconds_left))
        for path in ("/health", "/health/ready"):
            status, retry_after, body = await probe(cold, path)
            assert (status, retry_after, body["status"]) == (503, retry, "starting")
            assert body["warming"] == {
                "done": done,
                "total": 4,
                "seconds_left": seconds_left,
                "what": "compiling kernels",
            }
    await cold.start_engine()
    await cold.works()
    status, retry_after, body = await probe(cold)
    assert (status, retry_after, body["status"], body["warming"], body["notes"]) == (
        200,
        None,
        "ready",
        None,
        ["a fake"],
    )


async def test_notes_that_follow_replace_those_of_the_start(cold: Api) -> None:
    await cold.start_engine()
    cold.engine.link.send(EngineNotes(notes=("compiled",)))
    await cold.works()
    assert (await cold.call("GET", "/health"))[1]["notes"] == ["compiled"]


async def test_a_restart_is_not_ready_until_its_own_start_is_over(cold: Api) -> None:
    await cold.start_engine()
    assert (await probe(cold))[0] == 200
    await cold.engine.die()
    status, retry, body = await probe(cold)
    assert (status, retry, body["status"], body["engine_alive"]) == (503, "2", "starting", False)
    assert body["warming"] is None
    await cold.start_engine()
    assert (await probe(cold))[0] == 200


async def test_the_metrics_have_the_state_and_the_progress(cold: Api) -> None:
    async def found() -> set[str]:
        async with cold.http.get("/metrics") as response:
            return set((await response.text()).splitlines())

    assert {"coserve_ready 0.0", "coserve_warmup_total 0.0"} <= await found()
    cold.service.engine.starting(report(1))
    assert {"coserve_ready 0.0", "coserve_warmup_done 1.0", "coserve_warmup_total 4.0"} <= await found()
    await cold.start_engine()
    assert "coserve_ready 1.0" in await found()


@pytest.mark.parametrize(("load_format", "says"), [("auto", False), ("dummy", True)])
async def test_random_weights_are_owned_up_to(tmp_path: Path, load_format: str, says: bool) -> None:
    async with serve_real(tmp_path, load_format=load_format) as api:
        _, health = await api.call("GET", "/health")
    assert any("random" in note for note in health["notes"]) is says


async def test_a_cache_in_fp8_is_owned_up_to(tmp_path: Path) -> None:
    async with serve_real(tmp_path, kv_cache_dtype="fp8") as api:
        status, answer = await api.call(
            "POST", "/generate", json={"prompt": "The", "max_tokens": 8, "ignore_eos": True}
        )
        _, health = await api.call("GET", "/health")
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    assert any("FP8" in note for note in health["notes"])


async def test_training_that_starves_is_explained(tmp_path: Path) -> None:
    async with serve_api(tmp_path) as api:
        api.engine.stats(patience_slices=7, starving=Starving(seconds=12.4, micro_step=0.21, slack=0.15))
        await api.works()
        _, health = await api.call("GET", "/health")
        async with api.http.get("/metrics") as response:
            page = await response.text()
    assert health["notes"][-1] == (
        "for 12 s training has run only by train_patience and train_floor: a micro-step is predicted to take 210 ms, "
        "the slack is 150 ms"
    )
    assert "coserve_train_patience_slices_total 7.0" in page


@pytest.mark.parametrize(
    ("waits", "note"),
    [
        ((66.4, 0.0), "the oldest request in the queue has waited for 66 s"),
        ((0.0, 31.0), "training has waited for 31 s"),
        ((9.0, 9.0), None),
    ],
)
async def test_whoever_waits_for_long_is_told_of(tmp_path: Path, waits: tuple[float, float], note: str | None) -> None:
    """Under `ts` a job may run to its end first, under `inference-first` a steady load stops training."""
    async with serve_api(tmp_path) as api:
        api.engine.stats(waits=waits)
        await api.works()
        _, health = await api.call("GET", "/health")
    assert [one for one in health["notes"] if "waited" in one] == ([] if note is None else [note])


class _OneLost:
    """Two processes of an engine, of which one was killed."""

    loss = "rank 1 of 2 was killed by SIGKILL"
    lost = asyncio.Event()

    def states(self) -> tuple[RankInfo, ...]:
        return RankInfo(0, "ready", silent=3.0, behind=0), RankInfo(1, "lost", silent=4.0, behind=2)


async def test_processes_that_are_started_again_are_starting(tmp_path: Path) -> None:
    async def states(api: Api) -> list[tuple[str, float, int]]:
        _, health = await api.call("GET", "/health")
        return [(each["state"], each["silent"], each["behind"]) for each in health["ranks"]]

    lost = asyncio.Event()
    async with serve_api(tmp_path, tp=2) as api:
        api.service.engine.ranks = _OneLost()
        assert await states(api) == [("ready", 3.0, 0), ("lost", 4.0, 2)]
        with api.service.engine.watched(lost.set):
            await api.engine.die()
            await lost.wait()
        api.service.engine_failed("rank 1 of 2 was killed", started=True)
        assert await states(api) == [("starting", 0.0, 0)] * 2
        await api.start_engine()
        assert await states(api) == []


async def test_an_engine_that_has_work_and_says_nothing_is_told(tmp_path: Path) -> None:
    now = 0.0

    async def notes(api: Api) -> list[str]:
        found: list[str] = (await api.call("GET", "/health"))[1]["notes"]
        return [note for note in found if "said nothing" in note]

    async with serve_api(tmp_path, engine_clock=lambda: now) as api:
        await api.works()
        await reported(api, 0)
        now = 100.0
        assert await notes(api) == [], "it is idle"
        api.engine.go_requests.clear()
        call = asyncio.create_task(api.call("POST", "/generate", json={"prompt": "x"}))
        await api.engine.saw(Generate, 2)
        now = 119.0
        assert await notes(api) == []
        now = 142.4
        assert await notes(api) == ["the engine has said nothing for 42 s, though it has work"]
        assert (await api.call("GET", "/health/ready"))[0] == 503, "a load balancer sends requests elsewhere"
        api.engine.go_requests.set()
        await call
        assert await notes(api) == []
        assert (await api.call("GET", "/health/ready"))[0] == 200
        await reported(api, 1)
        now = 190.0
        assert await notes(api) == ["the engine has said nothing for 48 s, though it has work"], "a job trains"
        await reported(api, 0)
        now = 300.0
        assert await notes(api) == []


async def reported(api: Api, jobs: int) -> None:
    """The engine reports that it has so many jobs, and nothing else to do."""
    for count in (jobs + 1, jobs):
        api.engine.stats(jobs=count)
        while (await api.call("GET", "/health"))[1]["jobs"] != count:  # noqa: ASYNC110 - the message is read by another task
            await asyncio.sleep(0)


async def test_what_a_base_is_served_with_is_told_in_health_and_to_whom_it_refuses(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(bundled_base().spec, context=64, context_note="longrope: 64 of its 128 tokens")
    async with serve_real(tmp_path, dataclasses.replace(bundled_base(), spec=spec, note="dequantised")) as api:
        _, health = await api.call("GET", "/health")
        status, refused = await api.call("POST", "/generate", json={"prompt": [5] * 100, "max_tokens": 4})
    assert {"longrope: 64 of its 128 tokens", "dequantised"} <= set(health["notes"])
    assert status == 400
    assert refused["error"]["code"] == "prompt_too_long"
    assert "longrope: 64 of its 128 tokens" in refused["error"]["message"]
