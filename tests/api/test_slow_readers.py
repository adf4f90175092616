"""Server-sent events, and readers that do not read or that leave: they hold nobody up, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from coserve.api.generation.output_queue import MAX_MERGED, UNMERGED, EngineOutput, OutputQueue
from coserve.api.http.sse import EventStream
from coserve.core.link.generation import Admitted, CancelRequest, Generate, RequestFailed, Tokens
from coserve.core.logprobs import PackedLogprobs, TokenLogprob
from coserve.core.schemas.service import ErrorBody, ErrorInfo
from coserve.core.types import FinishReason
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
    async with aiohttp.ClientSession(api.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        responses = await asyncio.gather(*(session.post("/generate", json=asked) for _ in range(LEAVERS)))
        for response in responses:
            response.close()
    assert await streamed(api) == whole
    cancelled = await api.engine.saw(CancelRequest, LEAVERS)
    assert len({message.id for message in cancelled}) == LEAVERS


async def test_events_have_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    written = bytearray()

    async def write(response: web.StreamResponse, data: bytes) -> None:
        written.extend(data)

    monkeypatch.setattr(web.StreamResponse, "write", write)
    stream = EventStream(make_mocked_request("GET", "/"), write_timeout=1)
    assert not stream.begun
    await stream.send(ErrorBody(error=ErrorInfo(code="a", message="line\nline")), event="error", id=7)
    await stream.heartbeat()
    await stream.send("[DONE]")
    assert stream.begun
    assert written == (
        b'event: error\nid: 7\ndata: {"error":{"code":"a","message":"line\\nline","field":null}}\n\n'
        b": \n\ndata: [DONE]\n\n"
    )


async def test_an_event_that_is_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(response: web.StreamResponse, data: bytes) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(web.StreamResponse, "write", write)
    stream = EventStream(make_mocked_request("GET", "/"), write_timeout=0.01)
    with pytest.raises(ConnectionResetError):
        await stream.send("x")


def tokens(id: str, *ids: int, end: bool = False) -> Tokens:
    logprobs = PackedLogprobs.of(TokenLogprob(-float(each)) for each in ids)
    return Tokens(id=id, tokens=ids, logprobs=logprobs, finished=FinishReason.LENGTH if end else None)


async def drain(inbox: OutputQueue, until: EngineOutput) -> list[EngineOutput]:
    found = [await inbox.get()]
    while found[-1] != until:
        found.append(await inbox.get())
    return found


messages = st.one_of(
    st.builds(lambda name, count: tokens(name, *range(count)), st.sampled_from("ab"), st.integers(0, 3)),
    st.builds(lambda name: tokens(name, 7, end=True), st.sampled_from("ab")),
    st.builds(Admitted, id=st.sampled_from("ab")),
    st.builds(lambda name: RequestFailed(id=name, code="internal_error", message="m"), st.sampled_from("ab")),
)


@given(st.lists(messages, max_size=40))
def test_joining_keeps_order_tokens_and_ends(said: list[EngineOutput]) -> None:
    last = Admitted(id="last", at=0.0)

    async def run() -> list[EngineOutput]:
        inbox = OutputQueue()
        for message in (*said, last):
            inbox.put(message)
        return await drain(inbox, last)

    found = asyncio.run(run())
    assert _flat(found) == _flat([*said, last])
    for before, after in pairwise(found):
        if isinstance(before, Tokens) and isinstance(after, Tokens) and before.id == after.id:
            assert before.finished is not None, "two messages that could have been one"


def _flat(said: list[EngineOutput]) -> list[object]:
    """One entry a token, end or other message."""
    flat: list[object] = []
    for message in said:
        if isinstance(message, Tokens):
            flat += [(message.id, *pair) for pair in zip(message.tokens, message.logprobs, strict=True)]
            flat += [] if message.finished is None else [(message.id, message.finished)]
        else:
            flat.append(message)
    return flat


async def test_a_message_alone_is_not_waited_for_more_of() -> None:
    inbox = OutputQueue()
    got = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    assert not got.done()
    inbox.put(tokens("a", 1))
    assert await got == tokens("a", 1)


def test_what_waits_long_is_held_in_few_messages() -> None:
    inbox = OutputQueue()
    for number in range(UNMERGED + 10 * MAX_MERGED):
        inbox.put(tokens("a", number))
    assert len(inbox) <= UNMERGED + 11
