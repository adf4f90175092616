"""A client that does not read, and two hundred that leave at once, hold nobody else up. Over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from coserve.core.link.generation import Admitted, CancelRequest, Generate, Tokens
from tests.support.api_server import Api, serve_api
from tests.support.fake_engine import FakeEngine

TOGETHER, LEAVERS = 64, 200


class Endless(FakeEngine):
    """A request of more than `TOGETHER` tokens is answered without end."""

    async def answer(self, request: Generate) -> None:
        if request.sampling.max_tokens <= TOGETHER:
            await super().answer(request)
            return
        self.link.send(Admitted(id=request.id, at=time.monotonic()))
        while True:
            self.link.send(Tokens(id=request.id, tokens=(300,) * TOGETHER))
            await asyncio.sleep(0.001)


@pytest.fixture
def read_timeout() -> float:
    return 30.0


@pytest.fixture
async def api(tmp_path: Path, read_timeout: float) -> AsyncIterator[Api]:
    async with serve_api(
        tmp_path,
        engine_type=Endless,
        read_timeout=read_timeout,
        context=1 << 20,
        max_queue=2 * LEAVERS,
        max_connections=1000,
    ) as api:
        yield api


async def streamed(api: Api) -> str:
    """The text of a short stream."""
    asked = {"prompt": "x", "max_tokens": TOGETHER, "stream": True}
    async with api.http.post("/generate", json=asked) as response:
        lines = (await response.text()).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(event["text"] for event in events)


@pytest.mark.parametrize("read_timeout", [0.5])
async def test_a_reader_that_stops_is_let_go_and_others_go_on_meanwhile(api: Api) -> None:
    whole = await streamed(api)
    body = json.dumps({"prompt": "x", "max_tokens": 500_000, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", api.port)) as sock:
        head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"  # noqa: E501
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        await api.engine.saw(Generate, 2)
        gone = asyncio.create_task(api.engine.saw(CancelRequest))
        streams = 0
        while not gone.done():
            assert await streamed(api) == whole
            streams += 1
        assert streams > 1
    assert api.service.metrics.registry.get_sample_value("coserve_requests_total", {"finish_reason": "cancelled"}) == 1


@pytest.mark.slow
async def test_two_hundred_that_leave_at_once_hold_nobody_up(api: Api) -> None:
    whole = await streamed(api)
    asked = {"prompt": "x", "max_tokens": 500_000, "stream": True}
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{api.port}", connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        responses = await asyncio.gather(*(session.post("/generate", json=asked) for _ in range(LEAVERS)))
        for response in responses:
            response.close()
    assert await streamed(api) == whole
    cancelled = await api.engine.saw(CancelRequest, LEAVERS)
    assert len({message.id for message in cancelled if isinstance(message, CancelRequest)}) == LEAVERS
