"""More clients than the daemon has room for: idle ones go, busy ones stay, /health answers, and the log stays short."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from coserve.api.http.limits import OWN_DESCRIPTORS, RESERVE, connection_limit
from coserve.api.http.server import GRACE, CappedRunner, Connections, quiet_accept
from coserve.core.link.generation import Generate
from tests.support.api_server import Api, serve_api

LIMIT = 4
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def api(tmp_path: Path, clock: Clock) -> AsyncIterator[Api]:
    async with serve_api(tmp_path / "data", max_connections=LIMIT, clock=clock) as api:
        yield api


async def connect(api: Api) -> Streams:
    return await asyncio.open_connection("127.0.0.1", api.port)


async def ask(streams: Streams, path: str) -> int:
    """The status of one request; the connection stays open."""
    reader, writer = streams
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return await status(reader)


async def status(reader: asyncio.StreamReader) -> int:
    """The status of the next response, which is read to its end."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split()[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
    await reader.readexactly(length)
    return int(head.split()[1])


async def test_a_connection_serves_more_after_a_file(api: Api) -> None:
    streams = await connect(api)
    assert [await ask(streams, path) for path in ("/docs", "/docs", "/health")] == [200, 200, 200]
    await close(streams)


async def close(*opened: Streams) -> None:
    for _, writer in opened:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


class Gated(web.Response):
    """An answer whose body is made only when it is sent, as a large one's is."""

    def __init__(self) -> None:
        super().__init__(body=b"x" * 1000)
        self.began, self.go = asyncio.Event(), asyncio.Event()

    async def prepare(self, request: web.BaseRequest) -> object:  # type: ignore[override]
        self.began.set()
        await self.go.wait()
        return await super().prepare(request)


async def test_a_connection_whose_answer_is_still_being_made_is_busy() -> None:
    clock, answer = Clock(), Gated()
    connections = Connections(1, 10.0, clock)
    app = web.Application(middlewares=[connections.middleware])

    async def handle(request: web.Request) -> web.StreamResponse:
        return answer

    async def health(request: web.Request) -> web.StreamResponse:
        return web.Response(text="well")

    app.router.add_get("/", handle)
    app.router.add_get("/health", health)
    runner = CappedRunner(app, connections, keepalive_timeout=7.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        first = await asyncio.open_connection("127.0.0.1", port)
        asked = asyncio.create_task(ask(first, "/"))
        await answer.began.wait()
        clock.now += 2 * GRACE
        second = await asyncio.open_connection("127.0.0.1", port)
        assert await ask(second, "/health") == 200
        answer.go.set()
        assert await asked == 200
        clock.now += 2 * GRACE
        third = await asyncio.open_connection("127.0.0.1", port)  # the first, or the second, is idle now
        assert await ask(third, "/health") == 200
        await close(first, second, third)
    finally:
        await runner.cleanup()


async def test_idle_connections_make_room(api: Api, clock: Clock) -> None:
    opened = [await connect(api) for _ in range(LIMIT)]
    for streams in opened:
        assert await ask(streams, "/adapters") == 200
    clock.now += 2 * GRACE
    newer = [await connect(api) for _ in range(LIMIT)]
    for streams in newer:
        assert await ask(streams, "/adapters") == 200
    for reader, _ in opened:
        assert await reader.read() == b""  # closed
    await close(*opened, *newer)


async def test_requests_that_come_while_idle_connections_give_way_are_answered(api: Api, clock: Clock) -> None:
    """Whether they are still in the socket, or were read in the same turn of the loop."""
    opened = [await connect(api) for _ in range(LIMIT)]
    for streams in opened:
        assert await ask(streams, "/adapters") == 200
    for _ in range(20):
        clock.now += 2 * GRACE
        for _, writer in opened:
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        newer = await connect(api)
        assert set(await asyncio.gather(*(status(reader) for reader, _ in opened))) == {200}
        await close(newer)
    await close(*opened)


async def test_busy_connections_stay_and_health_answers(
    api: Api, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    api.engine.go_requests.clear()
    body = b'{"prompt": "x"}'
    opened = [await connect(api) for _ in range(LIMIT)]
    for _, writer in opened:
        writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await api.engine.saw(Generate, LIMIT)
    clock.now += 2 * GRACE
    further = [await connect(api) for _ in range(3)]
    assert await ask(further[0], "/health") == 200
    assert await ask(further[1], "/health/ready") == 200
    reader, writer = further[2]
    writer.write(b"GET /adapters HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"\r\nConnection: close\r\n" in answer, "else the next request would be sent into a closed one, and be lost"
    for start in (b"POST /generate", b"POST /health", b"GET /health"):  # half a body keeps no place of the reserve
        reader, writer = half = await connect(api)
        writer.write(start + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert (await reader.read()).startswith(b"HTTP/1.1 200" if start.startswith(b"GET") else b"HTTP/1.1 503")
        await close(half)
    more = [await connect(api) for _ in range(2 * RESERVE)]
    refused = await asyncio.gather(*(reader.read(12) for reader, _ in more[RESERVE:]))
    assert set(refused) == {b"HTTP/1.1 503"}
    assert len(caplog.records) == 1, "one line for all that are refused"
    api.engine.go_requests.set()
    for reader, _ in opened:
        assert (await reader.readline()).split()[1] == b"200"
    await close(*opened, *further, *more)
    await api.works()


async def test_asyncios_reports_of_accept_are_joined(caplog: pytest.LogCaptureFixture) -> None:
    handle, loop = quiet_accept(lambda: 0.0), asyncio.get_running_loop()
    for _ in range(500):
        handle(loop, {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "")})
    assert len(caplog.records) == 1
    handle(loop, {"message": "a fault of our own", "exception": ValueError("x")})
    assert len(caplog.records) == 2
    handle(loop, {"message": "Task exception was never retrieved", "exception": OSError(errno.EMFILE, "no more files")})
    assert "Task exception" in caplog.records[2].getMessage()
    assert caplog.records[2].exc_info


def test_the_limit_is_raised_and_connections_fit_into_it() -> None:
    code = (
        "import resource as r; from coserve.api.http.limits import connection_limit; "
        "r.setrlimit(r.RLIMIT_NOFILE, (100, 400)); print(connection_limit(1024), r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(400 - OWN_DESCRIPTORS - RESERVE), "400"]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert connection_limit(8) == 8
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


SERVER = """
import asyncio, resource, sys, time
from pathlib import Path
from coserve.api.http.server import quiet_accept
from coserve.api.http.limits import connection_limit
from tests.support.api_server import serve_api

def fast():
    return 1000 * time.monotonic()

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
    asyncio.get_running_loop().set_exception_handler(quiet_accept())
    async with serve_api(Path(sys.argv[1]), max_connections=connection_limit(1024), clock=fast) as api:
        print(api.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


async def test_a_process_with_few_descriptors_outlives_a_crowd(tmp_path: Path) -> None:
    """Two hundred connect at once and say nothing; jobs, imports and /health go on."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SERVER,
        str(tmp_path / "data"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    port = int(await process.stdout.readline())
    crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
    import aiohttp

    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        async with http.get("/health") as response:
            assert response.status == 200
        body = {"adapter": "poet", "data": [{"text": "a b"}]}
        async with http.post("/finetune", json=body) as response:
            assert response.status == 202
            job = await response.json()
        async with http.get(f"/finetune/{job['id']}/events") as response:
            assert '"succeeded"' in await response.text()
        async with http.post("/generate", json={"prompt": "x", "adapter": "poet"}) as response:
            assert response.status == 200
    await close(*crowd)
    process.stdin.close()
    said = (await process.stderr.read()).decode()
    assert await process.wait() == 0, said
    assert len(said.splitlines()) < 10, said
