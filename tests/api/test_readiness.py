"""`/health` and `/health/ready` while the engine starts, serves and is started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coserve.core.link.engine import EngineNotes, EngineWarming
from tests.support.api_server import Api, serve_api


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


async def test_a_probe_may_ask_for_headers_alone_and_name_no_host(cold: Api) -> None:
    for path in ("/health", "/health/ready"):
        async with cold.http.head(path) as response:
            assert (response.status, await response.read()) == (503, b"")
        assert await unnamed(cold, path) == 503
    assert await unnamed(cold, "/adapters") == 403


async def unnamed(api: Api, path: str) -> int:
    """The status of a request without a Host header."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


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
