"""Who may ask: keys, hosts, origins, deadlines and sizes, over raw sockets where a client library would be too
polite."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from coserve.api.app import ROUTES
from coserve.api.http.bodies import CHUNK
from coserve.api.http.security import Handler
from tests.support.api_server import Api, leap, serve_api
from tests.support.fake_engine import write_peft
from tests.support.heart import Heart
from tests.support.watched_server import OLD_JOB, fill

KEY = "s3cret-key-of-16-or-more"
FOREIGN_HOSTS = [
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost:1:2",
    "x/?",
    "a@localhost",
    "",
    "localhost:x",
    "[::1",
]
FOREIGN_ORIGINS = [
    "http://evil.example",
    "null",
    "https://localhost.evil.example",
    "file://localhost",
    "http://localhost/x",
]


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve_api(tmp_path / "data", api_key=KEY, allowed_hosts=("gpu.example",)) as api:
        yield api


def paths(api: Api) -> list[tuple[str, str]]:
    """Every method of every path of the router itself; answers to HEAD have no body to look at."""
    routes = [route for route in api.app.router.routes() if route.method != "HEAD"]
    return [(route.method, str(route.resource.canonical).replace("{id}", "x")) for route in routes]


def check_refusal(body: dict[str, Any], code: str) -> None:
    """Routes of TGI's, Tinker's and Anthropic's clients refuse in their shapes, which have no code of ours."""
    if "category" in body:
        assert body["category"] == "user"
    elif "error_type" in body:
        assert (set(body), body["error_type"]) == ({"error", "error_type"}, "validation")
    elif body.get("type") == "error":
        kinds = ("authentication_error", "permission_error", "rate_limit_error", "request_too_large")
        assert set(body["error"]) == {"type", "message"} and body["error"]["type"] in (*kinds, "invalid_request_error")
    else:
        assert body["error"]["code"] == code
        type = body["error"].get("type")  # in OpenAI's shape
        assert code != "unauthorized" or type in (None, "authentication_error")


async def test_without_the_key_only_health_is_open(locked: Api) -> None:
    table = {(route.method, route.path): route for route in locked.app[ROUTES]}
    assert sorted(table) == sorted(
        (r.method, str(r.resource.canonical))
        for r in locked.app.router.routes()
        if r.resource and r.method != "HEAD"  # of a probe, answered as GET is
    )
    assert [route.path for route in table.values() if route.public] == [
        "/health",
        "/health/ready",
        "/ping",
        "/ping",
        "/",
        "/page/{id}",
        "/docs",
    ]
    strange = [
        ("GET", "/nowhere"),
        ("POST", "/health"),
        ("DELETE", "/health"),
        ("GET", "/health/"),
        ("PUT", "/generate"),
    ]
    for method, path in [*paths(locked), *strange]:
        if path == "/ping" or (method == "GET" and path in ("/", "/page/x", "/docs", "/health", "/health/ready")):
            continue
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": KEY},
            {"Authorization": "Basic " + KEY},
        ):
            async with locked.http.request(method, path, headers=headers) as response:
                assert response.status == 401, (method, path, headers)
                assert response.headers["WWW-Authenticate"] == "Bearer"
                check_refusal(await response.json(), "unauthorized")
    for path in (
        b"//health",
        b"/%2e%2e/adapters",
        b"/health/../adapters",
        b"/health%2f..%2fadapters",
        b"http://x/health",
        b"/health?/adapters",
    ):
        answer = await locked.raw(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 401") or b'"engine_alive"' in answer, path
    assert (await locked.call("GET", "/health"))[0] == 200
    await locked.works()


async def test_hosts_and_origins(locked: Api) -> None:
    auth = {"Authorization": f"Bearer {KEY}"}
    for method, path in paths(locked):
        for headers in [{"Host": host} for host in FOREIGN_HOSTS] + [{"Origin": origin} for origin in FOREIGN_ORIGINS]:
            async with locked.http.request(method, path, headers=auth | headers) as response:
                assert response.status == 403, (method, path, headers)
                check_refusal(await response.json(), "forbidden_origin")
    for headers in (
        {"Host": "gpu.example:8000"},
        {"Host": "LOCALHOST"},
        {"Host": "[::1]:8000"},
        {"Origin": "http://localhost:3000"},
    ):
        async with locked.http.get("/adapters", headers=auth | headers) as response:
            assert response.status == 200, headers


async def test_pages_of_an_allowed_origin_read_answers(locked: Api) -> None:
    """As browsers ask: without the key first, then with it."""
    page, asking = "http://localhost:3000", {"Access-Control-Request-Method": "POST"}
    wanted = {"Access-Control-Request-Headers": "authorization,content-type"}
    for path in ("/v1/chat/completions", "/generate", "/adapters/x"):
        async with locked.http.options(path, headers={"Origin": page} | asking | wanted) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (204, page)
            assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
        async with locked.http.options(path, headers={"Origin": "http://evil.example"} | asking) as response:
            assert response.status == 403 and "Access-Control-Allow-Origin" not in response.headers
        for headers in (asking, {"Origin": page}):
            async with locked.http.options(path, headers=headers) as response:
                assert response.status == 401
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {KEY}"}, 200)):
        async with locked.http.get("/v1/models", headers=headers | {"Origin": page}) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (status, page)
            assert "Origin" in response.headers.getall("Vary")
    async with locked.http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}) as response:
        assert "Access-Control-Allow-Origin" not in response.headers
    await locked.works()


@pytest.mark.parametrize(
    ("origins", "pages", "others"),
    [
        (
            ("https://app.example", "HTTP://10.1.2.3:3000", "https://[fd00::1]:443"),
            ("https://app.example", "http://10.1.2.3:3000", "https://[fd00::1]"),
            ("http://app.example", "https://app.example:8443", "https://a.app.example", "http://10.1.2.3", "null"),
        ),
        (("*",), ("https://any.example:1", "null"), ()),
    ],
)
async def test_pages_of_named_origins_use_the_api(
    tmp_path: Path, origins: tuple[str, ...], pages: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """Scheme, name and port count. Such a name is none of the daemon's own."""
    auth = {"Authorization": f"Bearer {KEY}"}
    async with serve_api(tmp_path / "data", api_key=KEY, allowed_origins=origins) as api:
        for origin in (*pages, *others):
            status = 200 if origin in pages else 403
            async with api.http.get("/adapters", headers=auth | {"Origin": origin}) as response:
                assert response.status == status, origin
                shown = response.headers.get("Access-Control-Allow-Origin")
                assert shown == (origin if origin in pages else None)
        async with api.http.get("/adapters", headers=auth | {"Host": "app.example"}) as response:
            assert response.status == 403


async def test_probes_may_call_the_daemon_by_its_address(locked: Api) -> None:
    auth = {"Authorization": f"Bearer {KEY}"}
    for host in ("10.1.2.3:8000", "[fd00::1]:8000"):
        for path, status in (("/health", 200), ("/health/ready", 200), ("/ping", 200), ("/adapters", 403)):
            async with locked.http.get(path, headers=auth | {"Host": host}) as response:
                assert response.status == status, (path, host)
        async with locked.http.get("/health", headers={"Host": host, "Origin": f"http://{host}"}) as response:
            assert response.status == 403


async def test_compressed_bodies_are_not_unpacked(api: Api) -> None:
    bomb = zlib.compress(b"0" * (50 << 20))
    for encoding in ("deflate", "gzip", "br", "identity"):
        headers = {"Content-Encoding": encoding}
        await api.refused(415, "unsupported_encoding", "POST", "/generate", data=bomb, headers=headers)


async def test_every_answer_has_an_id_and_none_names_its_server(api: Api) -> None:
    for path in ("/health", "/nowhere", "/metrics"):
        async with api.http.get(path) as response:
            assert len(response.headers["X-Request-Id"]) == 16
            assert "Server" not in response.headers
            assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "id, kept", [("a-1:b/c", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)]
)
async def test_a_request_keeps_the_id_that_its_client_gave_it(api: Api, id: str, kept: bool) -> None:
    async with api.http.get("/ping", headers={"X-Request-Id": id}) as response:
        found = response.headers["X-Request-Id"]
    assert (found == id) if kept else (len(found) == 16)


async def test_our_own_faults_have_one_body(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise KeyError("/secret/path 0x7f00")

    api.service.health = broken  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.ERROR):
        async with api.http.get("/health") as response:
            assert response.status == 500
            body = await response.text()
    assert json.loads(body) == {"error": {"code": "internal_error", "message": "internal error", "field": None}}
    assert response.headers["X-Request-Id"] in caplog.text  # the log, and only the log, knows more
    assert "0x7f00" in caplog.text
    await api.works()


HEAD = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
EXPECT = b"Expect: 100-continue\r\n"
ASKED = "100 Continue\r\n\r\n"


async def slowly(api: Api, patch: pytest.MonkeyPatch, *parts: bytes | str | float) -> bytes:
    """Send bytes, wait until a text comes, let seconds pass; all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    found = b""
    for part in parts:
        if isinstance(part, bytes):
            writer.write(part)
        elif isinstance(part, str):
            found += await reader.readuntil(part.encode())
        else:
            await asyncio.sleep(0.01)  # the server has the bytes by then, or waits in earnest
            leap(patch, part)
    found += await reader.read()
    writer.close()
    return found


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (b"POST /gen",),
        (HEAD,),
        (HEAD, 20.0, b"X-A: b\r\n", 9.0, b"X-B: b\r\n"),
        (HEALTH, "engine_alive", b"GET /hea"),
    ],
    ids=["silence", "half a line", "half the headers", "dripping headers", "half of a second request"],
)
async def test_headers_have_a_deadline(
    locked: Api, parts: tuple[bytes | str | float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await slowly(locked, monkeypatch, *parts, 31.0)
    assert answer.count(b"HTTP/1.1") == (HEALTH in parts)
    await locked.works()


@pytest.mark.parametrize("length", [b"Content-Length: 1000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n5\r\n"])
@pytest.mark.parametrize("drip", [(), (20.0, b"a", 9.0, b"b")], ids=["silence", "drip"])
async def test_bodies_have_a_deadline(
    locked: Api, length: bytes, drip: tuple[bytes | float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (HEAD + EXPECT + length, ASKED, b'{"p', *drip, 2.0 if drip else 31.0)
    answer = await slowly(locked, monkeypatch, *parts, "408", 3.0)
    assert answer.partition(ASKED.encode())[2].startswith(b"HTTP/1.1 408")
    assert b'"request_timeout"' in answer
    await locked.works()


async def test_uploads_have_a_deadline(locked: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    head = HEAD.replace(b"/generate", b"/finetune") + b"Content-Type: multipart/form-data; boundary=b\r\n"
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{"text'
    for body in (b"", b"--b\r\n", part):
        parts = (head + EXPECT + b"Content-Length: 10000\r\n\r\n", ASKED, body, 31.0)
        answer = await slowly(locked, monkeypatch, *parts, "408", 3.0)
        assert answer.partition(ASKED.encode())[2].startswith(b"HTTP/1.1 408"), body
    assert list(locked.folder.staging.iterdir()) == []
    await locked.works()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 9000 + b"\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a" * 9000 + b": X\r\n\r\n", 400),
        (b"GET /health?" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 2000 + b"\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
    ],
)
async def test_what_is_no_http_is_refused_without_a_word_in_the_log(
    locked: Api, request_bytes: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        answer = await locked.raw(request_bytes)
    assert answer.startswith((f"HTTP/1.1 {status}".encode(), f"HTTP/1.0 {status}".encode())), answer
    assert b"Traceback" not in answer
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    await locked.works()


async def test_a_giant_header_is_refused_before_it_has_come(locked: Api) -> None:
    """50 MB in one header: the connection is closed while it comes, and the memory stays."""
    reader, writer = await asyncio.open_connection("127.0.0.1", locked.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 50 << 20 and not reader.at_eof():
            writer.write(b"a" * CHUNK)
            sent += CHUNK
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        assert (await reader.read()).startswith((b"HTTP/1.1 400", b""))
    writer.close()
    assert sent < 50 << 20
    await locked.works()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n", 401),
        (HEAD.replace(b"localhost", b"evil.example") + b"Content-Length: 15\r\n", 403),
        (HEAD + b"Content-Length: 99999999999\r\n", 413),
        (HEAD + b"Content-Length: 15\r\nContent-Encoding: gzip\r\n", 415),
        (HEAD.replace(b"/generate", b"/finetune") + b"Content-Length: 15\r\n", 100),
        (HEAD + b"Content-Length: 15\r\n", 100),
    ],
)
async def test_a_body_is_asked_for_only_when_it_will_be_read(locked: Api, head: bytes, status: int) -> None:
    end = b"Connection: close\r\nExpect: 100-continue\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", locked.port)
    writer.write(head + end)
    answer = await reader.readuntil(b"\r\n\r\n")
    if b"100 Continue" in answer:
        writer.write(b'{"prompt": "x"}')
    else:
        writer.write_eof()  # or the server waits a while for the body
    answer += await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"100 Continue") == (status == 100)
    if status == 100:
        assert answer.count(b"HTTP/1.1 ") == 2
    await locked.works()


@pytest.mark.parametrize("path", [b"/openapi.json", b"/nowhere"], ids=["bodies", "refusals"])
async def test_answers_that_nobody_reads_have_a_deadline_and_do_not_pile_up(tmp_path: Path, path: bytes) -> None:
    async with serve_api(tmp_path / "data", read_timeout=0.4) as api:
        asked = 50_000 if path == b"/nowhere" else 400  # more bytes of answers than the sockets hold
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", api.port))
            client.setblocking(False)
            requests = (b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n") * asked
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                async with asyncio.timeout(120):
                    while True:
                        await asyncio.get_running_loop().sock_sendall(client, requests)
                        requests = b"x"
                        await asyncio.sleep(0.02)
        page = api.service.metrics.page(restarts=0).decode()
        answered = sum(
            float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if "coserve_http_answers_total{" in line
        )
        assert answered < asked / 2
        await api.works()


def gone(transport: asyncio.Transport) -> bool:
    """Whether it is closed and nothing waits in it, sent or thrown away."""
    return transport.is_closing() and not transport.get_write_buffer_size()


async def cut_off(client: socket.socket) -> bool:
    """Whether the answer that waits here ends before its end."""
    loop, last = asyncio.get_running_loop(), b""
    try:
        while piece := await asyncio.wait_for(loop.sock_recv(client, 1 << 20), 120):
            last = piece
    except ConnectionResetError:
        return True
    return not last.endswith((b"0\r\n\r\n", bytes(1024)))


@pytest.mark.parametrize("kind", ["download", "events of a job"])
async def test_long_answers_that_nobody_reads_have_a_deadline(tmp_path: Path, kind: str) -> None:
    """So has a stream of an answer (test_slow_readers.py)."""
    ended = asyncio.Queue[asyncio.Transport]()

    @web.middleware
    async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        try:
            return await handler(request)
        finally:
            ended.put_nowait(transport)

    async with serve_api(tmp_path / "data", read_timeout=0.4, data_root=tmp_path, middlewares=[watch]) as api:
        if kind == "download":
            write_peft(tmp_path / "large", api.base, rank=65_535, value=1.0)  # the archive's end is zeros
            wanted = {"name": "large", "path": str(tmp_path / "large")}
            assert (await api.call("POST", "/adapters", json=wanted))[0] == 201
            line = b"GET /adapters/large/download"
        else:
            fill(api.folder, adapters=0, jobs=0, events=50_000)
            line = b"GET /finetune/" + OLD_JOB.encode() + b"/events"
        while not ended.empty():
            ended.get_nowait()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", api.port))
            client.setblocking(False)
            client.send(line + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert gone(await asyncio.wait_for(ended.get(), 120))
            assert await cut_off(client)
        await api.works()


async def read_slowly(api: Api) -> bytes:
    """The body of a long answer, as much as comes."""
    ids = ",".join(["77"] * 500_000).encode()
    body = b'{"tokens": [' + ids + b"]}"
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=1 << 16)
    head = b"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    taken = b""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(1 << 18):
            taken += piece
            await asyncio.sleep(0.05)
    writer.close()
    return taken.partition(b"\r\n\r\n")[2]


async def test_a_reader_that_is_slow_but_reads_gets_the_whole_answer(tmp_path: Path) -> None:
    async with serve_api(tmp_path / "data", read_timeout=0.5) as api:
        heart = Heart(time.monotonic)
        while not (answer := await read_slowly(api)).endswith(b"}") or len(answer) < 500_000:
            assert heart.longest > 0.3, "cut off, though this process always ran"
            heart = Heart(time.monotonic)
        assert len(json.loads(answer)["prompt"]) >= 500_000
