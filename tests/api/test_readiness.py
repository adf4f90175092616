"""`/health` and `/health/ready` while the engine starts, warms up, serves and is started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coserve.link import EngineNotes
from tests.support.api_server import Api, serve_api
from tests.support.fake_engine import FakeEngine


class ColdEngine(FakeEngine):
    """Its warm-up has four steps; none is done yet."""

    warmup_steps = 4


async def probe(api: Api, path: str = "/health/ready") -> tuple[int, str | None, dict[str, Any]]:
    """Status, `Retry-After` and body of a probe."""
    async with api.http.get(path) as response:
        return response.status, response.headers.get("Retry-After"), await response.json()


@pytest.fixture
async def cold(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve_api(tmp_path, engine=False, engine_type=ColdEngine) as api:
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


async def test_a_warm_up_is_told_with_its_progress_and_ends_ready(cold: Api) -> None:
    await cold.start_engine()
    for done, seconds_left, retry in ((1, None, "2"), (2, 3.2, "4"), (3, 900.0, "10"), (3, 0.0, "1")):
        cold.engine.warming(done, seconds_left, ("eager until compiled",))
        await cold.works()  # requests are answered meanwhile
        status, health = await cold.call("GET", "/health")
        assert (status, health["status"], health["notes"]) == (200, "warming", ["eager until compiled"])
        assert health["warming"] == {"done": done, "total": 4, "seconds_left": seconds_left}
        assert (await probe(cold))[:2] == (503, retry)

    cold.engine.warming(4, None, ())
    await cold.works()
    status, retry_after, body = await probe(cold)
    assert (status, retry_after, body["status"], body["warming"], body["notes"]) == (200, None, "ready", None, [])


async def test_notes_that_follow_replace_those_of_the_warm_up(cold: Api) -> None:
    await cold.start_engine()
    cold.engine.warming(1, None, ("eager until compiled",))
    cold.engine.link.send(EngineNotes(notes=("compiled",)))
    await cold.works()
    assert (await cold.call("GET", "/health"))[1]["notes"] == ["compiled"]


async def test_a_restart_is_not_ready_until_its_own_warm_up_is_over(cold: Api) -> None:
    await cold.start_engine()
    cold.engine.warming(4)
    await cold.works()
    assert (await probe(cold))[0] == 200

    await cold.engine.die()
    status, retry, body = await probe(cold)
    assert (status, retry, body["status"], body["engine_alive"]) == (503, "2", "starting", False)
    await cold.start_engine()
    assert (await probe(cold))[2]["status"] == "warming"
    cold.engine.warming(4)
    await cold.works()
    assert (await probe(cold))[0] == 200


async def test_ready_when_listening(tmp_path: Path) -> None:
    async with serve_api(tmp_path, engine=False, engine_type=ColdEngine, ready_when="listening") as api:
        assert (await probe(api))[0] == 503
        await api.start_engine()
        status, retry, body = await probe(api)
        assert (status, retry, body["status"]) == (200, None, "warming")
        await api.engine.die()
        assert (await probe(api))[0] == 503


async def test_the_metrics_have_the_state_and_the_progress(cold: Api) -> None:
    async def found() -> set[str]:
        async with cold.http.get("/metrics") as response:
            return set((await response.text()).splitlines())

    assert {"coserve_ready 0.0", "coserve_warmup_total 0.0"} <= await found()
    await cold.start_engine()
    cold.engine.warming(1)
    await cold.works()
    assert {"coserve_ready 0.0", "coserve_warmup_done 1.0", "coserve_warmup_total 4.0"} <= await found()
    cold.engine.warming(4)
    await cold.works()
    assert {"coserve_ready 1.0", "coserve_warmup_done 4.0"} <= await found()
