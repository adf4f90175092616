"""A client that was closed says so: to later calls, and to those that it ended."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from coserve.client import AsyncClient, Client, MockTransport, Request, Response
from coserve.core.errors import CoserveError, InvalidRequest
from tests.support.sdk import chunk, job, reply, stream_of

CLOSED = "^the client is closed$"
CALLS: list[Callable[[Any], Any]] = [
    lambda client: client.health(),
    lambda client: client.wait_ready(),
    lambda client: client.generate("hi"),
    lambda client: client.finetune("a", [{"text": "x"}]),
    lambda client: client.download_adapter("a", "folder"),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_a_closed_client(call: Callable[[Client], object]) -> None:
    client = Client(transport=MockTransport(lambda _: Response(500)))
    client.close()
    with pytest.raises(InvalidRequest, match=CLOSED):
        call(client)
    gc.collect()  # a coroutine that nobody awaited would warn now
    client.close()


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_of_a_closed_asynchronous_client(call: Callable[[AsyncClient], Any]) -> None:
    client = AsyncClient(transport=MockTransport(lambda _: Response(500)))
    await client.close()
    with pytest.raises(InvalidRequest, match=CLOSED):
        await call(client)
    await client.close()


def answers(request: Request) -> Response:
    return stream_of(chunk("a"), chunk("b")) if request.path == "/generate" else reply(job(), 202)


def test_streams_and_jobs_of_a_closed_client() -> None:
    client = Client(transport=MockTransport(answers))
    begun, new, handle = client.stream("hi"), client.stream("hi"), client.finetune("a", [{"text": "x"}])
    next(begun)
    client.close()
    for stream in (begun, new, handle.events()):
        with pytest.raises(InvalidRequest, match=CLOSED):
            next(stream)
        stream.close()
    for call in (handle.refresh, handle.cancel, handle.wait):
        with pytest.raises(InvalidRequest, match=CLOSED):
            call()
    gc.collect()


async def test_streams_and_jobs_of_a_closed_asynchronous_client() -> None:
    client = AsyncClient(transport=MockTransport(answers))
    handle = await client.finetune("a", [{"text": "x"}])
    await client.close()
    for call in (anext(client.stream("hi")), anext(handle.events()), handle.refresh(), handle.wait()):
        with pytest.raises(InvalidRequest, match=CLOSED):
            await call


@pytest.mark.parametrize("call", [lambda client: client.generate("hi"), lambda client: next(client.stream("hi"))])
def test_closing_ends_the_calls_of_other_threads(call: Callable[[Client], object]) -> None:
    asked, got = threading.Event(), list[CoserveError]()

    async def never(_: Request) -> Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    client = Client(transport=MockTransport(never))

    def ask() -> None:
        with pytest.raises(InvalidRequest, match=CLOSED) as caught:
            call(client)
        got.append(caught.value)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(30)
    client.close()
    thread.join()
    assert len(got) == 1


def test_many_threads_call_while_the_client_closes() -> None:
    begun, got = threading.Barrier(9), list[str]()
    client = Client(transport=MockTransport(answers))

    def ask() -> None:
        begun.wait()
        with pytest.raises(InvalidRequest) as caught:
            while True:
                client.finetune("a", [{"text": "x"}])
        got.append(str(caught.value))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    begun.wait()
    client.close()
    for thread in threads:
        thread.join()
    assert got == ["the client is closed"] * 8
    gc.collect()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.parametrize(
    "call",
    [lambda client: client.health(), lambda client: client.generate("hi"), lambda client: anext(client.stream("hi"))],
)
@pytest.mark.parametrize("head", [b"", HEAD])
async def test_closing_ends_a_call_over_http(call: Callable[[AsyncClient], Any], head: bytes) -> None:
    asked, connections = asyncio.Event(), list[asyncio.Task[Any] | None]()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        writer.write(head)
        asked.set()
        with suppress(ConnectionError):
            await reader.read()
            writer.close()
            await writer.wait_closed()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        client = AsyncClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        running = asyncio.ensure_future(call(client))
        await asked.wait()
        await client.close()
        with pytest.raises(InvalidRequest, match=CLOSED):
            await running
        await asyncio.sleep(0.05)  # aiohttp may have begun another connection for a GET
        await asyncio.gather(*filter(None, connections))


async def test_a_transport_that_was_given_stays_open() -> None:
    transport = MockTransport(answers)
    async with AsyncClient(transport=transport):
        pass
    assert (await AsyncClient(transport=transport).finetune("a", [{"text": "x"}])).id == "job-1"


def test_a_call_from_the_thread_of_the_client_is_refused() -> None:
    """They would wait for themselves."""
    clients: list[Client] = []
    errors: list[InvalidRequest] = []

    def respond(request: Request) -> Response:
        for call in (clients[0].health, clients[0].close):
            with pytest.raises(InvalidRequest, match="thread") as caught:
                call()
            errors.append(caught.value)
        return answers(request)

    with Client(transport=MockTransport(respond)) as client:
        clients.append(client)
        assert client.finetune("a", [{"text": "x"}]).id == "job-1"
    assert len(errors) == 2
