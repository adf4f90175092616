"""The SDK over a real socket: what aiohttp raises comes out as `Unreachable`, uploads go as the daemon reads them; and
server-sent events, however the bytes are cut."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from aiohttp import BodyPartReader, web
from hypothesis import given
from hypothesis import strategies as st

from coserve.client import AsyncClient, HttpTransport, Request, Upload
from coserve.client.sse import Event, EventParser
from coserve.core.errors import InvalidRequest, Unreachable
from tests.support.sdk import chunk

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler, *, read_timeout: float = 60.0) -> AsyncIterator[HttpTransport]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    transport = HttpTransport(f"http://127.0.0.1:{runner.addresses[0][1]}/", read_timeout=read_timeout)
    try:
        yield transport
    finally:
        await transport.close()
        await runner.cleanup()


async def test_request_and_answer() -> None:
    async def handler(request: web.Request) -> web.Response:
        said = (
            f"{request.method} {request.path_qs} {request.headers['X-A']} {request.content_type} {await request.text()}"
        )
        return web.Response(status=418, text=said, headers={"Retry-After": "3"})

    async with served(handler) as transport:
        request = Request("POST", "/a%2Fb", query=(("q", "ä&b"),), headers={"X-A": "x"}, body=b"{}")
        response = await transport.send(request)
        assert (response.status, response.headers["retry-after"]) == (418, "3")
        assert await response.read() == b"POST /a%2Fb?q=%C3%A4%26b x application/json {}"


async def test_no_request_waits_for_another() -> None:
    """However many there are: the daemon is to see all that a client wants of it."""
    count, all_here, waiting = 150, asyncio.Event(), 0

    async def handler(_: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting == count:
            all_here.set()
        await all_here.wait()
        return web.Response()

    async with served(handler) as transport, asyncio.timeout(120):
        responses = await asyncio.gather(*(transport.send(Request("GET", "/")) for _ in range(count)))
        assert {response.status for response in responses} == {200}
        for response in responses:
            response.close()


async def test_a_process_that_may_open_no_more_files_is_told_so() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)  # and accepts nobody
        transport = HttpTransport(f"http://127.0.0.1:{server.getsockname()[1]}", read_timeout=60)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (server.fileno() + 8, hard))
        try:
            calls = [asyncio.create_task(transport.send(Request("GET", "/"))) for _ in range(20)]
            ended, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION, timeout=60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for call in waiting:
            call.cancel()
        errors = [call.exception() for call in ended]
        await asyncio.gather(*waiting, return_exceptions=True)
        await transport.close()
    assert errors
    for error in errors:
        assert isinstance(error, Unreachable) and not error.sent
        assert "Too many open files: each request at a time takes one" in str(error)


async def test_upload(tmp_path: Path) -> None:
    seen: list[tuple[str | None, str | None, bytes, set[str]]] = []

    async def handler(request: web.Request) -> web.Response:
        reader = await request.multipart()
        while (part := await reader.next()) is not None:
            assert isinstance(part, BodyPartReader)
            seen.append((part.name, part.filename, bytes(await part.read()), {name.lower() for name in part.headers}))
        return web.Response()

    (tmp_path / "big").write_bytes(b"x" * 200_000)
    async with served(handler) as transport:
        upload = Upload(b'{"a":1}', (("corpus.jsonl", b"row\n"), ("big.bin", tmp_path / "big")))
        for _ in range(2):  # a second attempt sends the same
            await (await transport.send(Request("POST", "/", body=upload))).read()
    assert seen[:3] == seen[3:]
    assert [part[:3] for part in seen[:3]] == [
        ("settings", None, b'{"a":1}'),
        ("file", "corpus.jsonl", b"row\n"),
        ("file", "big.bin", b"x" * 200_000),
    ]
    assert not any("content-encoding" in part[3] or "content-transfer-encoding" in part[3] for part in seen)


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        transport = HttpTransport(f"http://127.0.0.1:{taken.getsockname()[1]}", read_timeout=60)
        with pytest.raises(Unreachable, match="no daemon answers") as caught:
            await transport.send(Request("GET", "/"))
        assert not caught.value.sent
        await transport.close()


async def test_a_daemon_without_tls() -> None:
    def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        transport = HttpTransport(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", read_timeout=60)
        with pytest.raises(Unreachable, match=r"no TLS with .*SSL: .*; SSL_CERT_FILE names"):
            await transport.send(Request("GET", "/"))
        await transport.close()


async def test_a_connection_that_breaks_before_the_answer() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with served(handler) as transport:
        for request, sent in (
            (Request("GET", "/"), True),
            (Request("POST", "/finetune", body=b"{}"), True),
            (Request("POST", "/generate", body=b"{}"), False),  # it ended with its connection
        ):
            with pytest.raises(Unreachable) as caught:
                await transport.send(request)
            assert caught.value.sent is sent


async def test_closing_ends_a_stream_under_way() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + msgspec.json.encode(chunk("a")) + b"\n\n")
        await asyncio.Event().wait()
        return response

    async with served(handler) as transport:
        client = AsyncClient(transport=transport)
        stream = client.stream("hi")
        assert (await anext(stream)).text == "a"
        rest = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await client.close()
        await transport.close()
        with pytest.raises(InvalidRequest, match="the client is closed"):
            await asyncio.wait_for(rest, 120)


async def test_a_connection_that_breaks_within_the_answer() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with served(handler) as transport:
        response = await transport.send(Request("GET", "/"))
        with pytest.raises(Unreachable) as caught:
            await response.read()
        assert caught.value.sent


async def test_silence_is_given_up() -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with served(handler, read_timeout=0.05) as transport:
        with pytest.raises(Unreachable) as caught:
            await transport.send(Request("GET", "/"))
        assert caught.value.sent


async def test_leaving_a_stream_closes_its_connection() -> None:
    gone = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b'data: {"error": 1}\n\n')
                await asyncio.sleep(0.01)
        except ConnectionError:
            gone.set()
            raise

    async with served(handler) as transport:
        response = await transport.send(Request("GET", "/"))
        pieces = aiter(response)
        await anext(pieces)
        response.close()
        async with asyncio.timeout(120):
            await gone.wait()


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "http://h/v1", "http://h:8000/v1/", "ftp://x", "", "http://", "http://h:x", "http://h:99999"],
)
def test_addresses_are_checked(url: str) -> None:
    with pytest.raises(InvalidRequest, match="base_url"):
        AsyncClient(url)


texts = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=8)


def parse(*pieces: bytes) -> list[Event]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_fields() -> None:
    stream = b": hello\n\nid: 7\nevent: error\ndata: one\ndata:two\nretry: 5\n\ndata: three\n\ndata: unfinished"
    assert parse(stream) == [Event("one\ntwo", "error", "7"), Event("three", "message", "7")]


def test_an_id_with_a_null_character_is_ignored() -> None:
    """As the standard of server-sent events says."""
    assert parse(b"id: 7\ndata: a\n\nid: 8\0\ndata: b\n\n") == [Event("a", "message", "7"), Event("b", "message", "7")]


def test_an_event_without_data_is_none() -> None:
    assert parse(b"event: x\n\n\n\ndata\n\n") == [Event("")]


@given(
    st.lists(st.tuples(st.lists(texts, min_size=1, max_size=3), st.none() | st.integers(0, 99)), max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(0, 300), max_size=12),
)
def test_any_cut_gives_the_same_events(events: list[tuple[list[str], int | None]], end: str, cuts: list[int]) -> None:
    text, expected, last = "", [], None
    for lines, number in events:
        if number is not None:
            last = str(number)
            text += f"id: {number}{end}"
        text += "".join(f"data: {line}{end}" for line in lines) + ": comment" + end + end
        expected.append(Event("\n".join(lines), "message", last))
    body = text.encode()
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    assert parse(*(body[a:b] for a, b in pairwise(places))) == expected
