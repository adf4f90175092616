"""Server-sent events: their shape, and readers that do not read."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from coserve.api.http.sse import EventStream
from coserve.core.schemas import ErrorBody, ErrorInfo


class Sink:
    """Stands in for the connection: keeps what is written, or never gets rid of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stuck: bool = False) -> None:
        self.written = b""

        async def write(response: web.StreamResponse, data: bytes) -> None:
            if stuck:
                await asyncio.Event().wait()
            self.written += data

        monkeypatch.setattr(web.StreamResponse, "write", write)


async def test_events_have_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Sink(monkeypatch)
    stream = EventStream(make_mocked_request("GET", "/"), write_timeout=1)
    assert not stream.begun
    await stream.send(ErrorBody(error=ErrorInfo(code="a", message="line\nline")), event="error", id=7)
    await stream.heartbeat()
    await stream.send("[DONE]")
    assert stream.begun
    assert sink.written == (
        b'event: error\nid: 7\ndata: {"error":{"code":"a","message":"line\\nline","field":null}}\n\n'
        b": \n\ndata: [DONE]\n\n"
    )


async def test_a_reader_that_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    Sink(monkeypatch, stuck=True)
    stream = EventStream(make_mocked_request("GET", "/"), write_timeout=0.01)
    with pytest.raises(ConnectionResetError):
        await stream.send("x")
