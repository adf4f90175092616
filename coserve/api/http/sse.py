"""Server-sent events: `data: <JSON>` and a blank line. A client that stops reading is disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec
from aiohttp import web

from coserve.core.errors import CoserveError

T = TypeVar("T", bound=msgspec.Struct)
_encoder = msgspec.json.Encoder()
SMALL = 1 << 14
"""Bytes that an idle connection accepts without waiting."""
RUN = 4
RUN_BYTES = 1 << 12
"""Most events, and most bytes of events, sent per event-loop iteration, however fast their reader is."""


WRITE_TIMEOUT = web.AppKey("write_timeout", float)
"""Seconds that a write may wait for the client."""


class EventStream:
    """One response of events, with the HTTP `status`. `write_timeout`: seconds that a write may wait for the client."""

    def __init__(self, request: web.Request, *, write_timeout: float, status: int = 200) -> None:
        self._request, self._timeout = request, write_timeout
        self._run, self._run_bytes = 0, 0
        self._response = web.StreamResponse(
            status=status,
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",  # stops nginx from buffering events
            },
        )

    @property
    def begun(self) -> bool:
        """Whether the status line is sent; from then on, errors can only be events."""
        return self._response.prepared

    async def send(self, body: msgspec.Struct | str, *, event: str | None = None, id: int | None = None) -> None:
        """Send one event; a string is sent unchanged. Raises `ConnectionError` if the client left or does not read."""
        data = body.encode() if isinstance(body, str) else _encoder.encode(body)
        head = (f"event: {event}\n" if event else "") + (f"id: {id}\n" if id is not None else "")
        await self._write(head.encode() + b"data: " + data + b"\n\n")
        self._run, self._run_bytes = self._run + 1, self._run_bytes + len(data)
        if self._run >= RUN or self._run_bytes >= RUN_BYTES:
            self._run, self._run_bytes = 0, 0
            await asyncio.sleep(0)

    async def heartbeat(self) -> None:
        """Send a comment, so that proxies and clients keep the connection open."""
        await self._write(b": \n\n")

    async def _write(self, data: bytes) -> None:
        if not self.begun:
            await self._response.prepare(self._request)
        transport = self._request.transport
        if transport is not None and len(data) <= SMALL and not transport.get_write_buffer_size():
            await self._response.write(data)  # cannot block: one timer per token would cost more than the write
            return
        try:
            async with asyncio.timeout(self._timeout):
                await self._response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the reader stopped reading") from None

    async def close(self) -> web.StreamResponse:
        """End the response, which may have no event."""
        await self._response.prepare(self._request)
        await self._response.write_eof()
        return self._response


async def event_response(
    request: web.Request,
    events: AsyncGenerator[T | None, None],
    failure: Callable[[CoserveError], msgspec.Struct],
    *,
    status: int = 200,
    error_event: str | None = None,
    last: str | None = None,
    id_of: Callable[[T], int | None] = lambda _: None,
    event_of: Callable[[T], str | None] = lambda _: None,
) -> web.StreamResponse:
    """Send `events`, then `last`, and close the generator; None is sent as a heartbeat.

    An error before the first event is raised. A later one is sent as an event, whose data `failure` makes; if it has a
    name (`error_event`), `last` does not follow.
    """
    stream = EventStream(request, write_timeout=request.app[WRITE_TIMEOUT], status=status)
    async with aclosing(events):
        try:
            async for event in events:
                if event is None:
                    await stream.heartbeat()
                else:
                    await stream.send(event, event=event_of(event), id=id_of(event))
        except CoserveError as error:
            if not stream.begun:
                raise
            await stream.send(failure(error), event=error_event)
            last = last if error_event is None else None
    if last is not None:
        await stream.send(last)
    return await stream.close()
