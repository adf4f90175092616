"""The server below the routes: limits that aiohttp does not set on a connection.

- A response that the client does not read has a deadline.
- Bytes that are not HTTP, and headers that are too large, get a fixed response, which names neither the server nor the
  bytes.
- `100 Continue` is sent when a handler wants the body: after host, key and size were checked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict, CIMultiDictProxy

from coserve.api.http.connections import CappedRunner, Connections
from coserve.api.http.json_blocks import JSON
from coserve.api.http.responses import NATIVE_ERRORS
from coserve.core.errors import CoserveError, HeadersTooLarge, InternalError, InvalidRequest

log = logging.getLogger(__name__)

EXPECTS = web.RequestKey("expects", bool)
"""Set if the client waits for `100 Continue` before it sends the body."""
RUNNER_OPTIONS = ("handle_signals", "handler_cancellation", "shutdown_timeout")
"""Options of the runner; all others are options of its connections."""
READ_SIZE = 8 << 10
"""Bytes received and parsed per event-loop iteration: parsing chunks of one byte costs some µs each."""
DISCARDED_READS = 32
"""Reads of `READ_SIZE` bytes that are discarded from a request that got an error before it was parsed."""
MIN_READ = 64 << 10
"""Bytes that a client must read within the deadline, if that many are queued for it."""


async def ask_for_body(request: web.Request) -> None:
    """Send `100 Continue` to a client that waits for it. Later calls do nothing."""
    if request.get(EXPECTS):
        request[EXPECTS] = False
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the interim response does not count


class _PlainResponse(web.Response):
    """A response sent outside of the application, where no signal handler removes the `Server` header."""

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.pop("Server", None)


class HttpConnection(RequestHandler):
    """One connection. `write_timeout`: seconds in which the client must read all that is queued for it, or 64 KiB of
    it."""

    __slots__ = (
        "_connections",
        "_deadline",
        "_read_target",
        "_transport",
        "_write_timeout",
        "_writer",
        "_written_before",
    )

    def __init__(
        self,
        server: web.Server,
        connections: Connections,
        *,
        write_timeout: float,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(server, **options)
        self._connections, self._write_timeout = connections, write_timeout
        self._deadline: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._read_target = 0
        self._writer: AbstractStreamWriter | None = None
        self._written_before = 0

    def writes_with(self, writer: AbstractStreamWriter) -> None:
        """Set the writer of the next response, which counts its bytes."""
        self._written_before, self._writer = self._written(), writer

    def _written(self) -> int:
        """Bytes of all responses so far."""
        return self._written_before + (0 if self._writer is None else self._writer.output_size)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response; aiohttp calls this after the middlewares."""
        if self._connections.closes(self):
            resp.force_close()  # tell the client: it would send its next request into a closed connection
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._connections.response_sent(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport  # aiohttp forgets its own at close, though bytes may still be queued
        if hasattr(
            transport, "max_size"
        ):  # asyncio's own socket transports: what one receives at once is parsed at once
            transport.max_size = READ_SIZE
        transport.set_write_buffer_limits(high=0)  # "paused" then means that bytes wait for the reader
        sock = transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):  # for bytes queued when it is closed
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._write_timeout))
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._connections.received(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)
        self._connections.lost(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_deadline()

    def _start_deadline(self) -> None:
        assert self._transport is not None, "only a connection that was made can be paused"
        self._read_target = self._read_by_client() + min(MIN_READ, max(1, self._transport.get_write_buffer_size()))
        self._deadline = self._loop.call_later(self._write_timeout, self._check_reader)

    def _read_by_client(self) -> int:
        """Bytes that the client has read so far."""
        assert self._transport is not None, "only a connection that was made has bytes"
        return self._written() - self._transport.get_write_buffer_size()

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _check_reader(self) -> None:
        assert self._transport is not None, "the deadline ends with the connection"
        if self._read_by_client() < self._read_target:
            self._transport.abort()
        else:
            self._start_deadline()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to bytes that are not HTTP. `message` could repeat the bytes, so it is not shown."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun: another one cannot be sent")
        error: CoserveError = InvalidRequest("the request is not valid HTTP")
        if status >= 500:
            log.error("a request failed outside of its handler", exc_info=exc)
            error = InternalError("internal error")
        elif isinstance(exc, LineTooLong) or "Too many headers" in str(exc):
            size, count = self.max_field_size, self.max_headers
            error = HeadersTooLarge(
                f"expected at most {count} headers, and at most {size} bytes in each and in the request line"
            )
        response = _PlainResponse(
            status=error.status, body=msgspec.json.encode(NATIVE_ERRORS.make(error)), content_type=JSON
        )
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.force_close()
        self._discard_input()
        return response

    def _discard_input(self) -> None:
        """Discard up to some hundred KiB of received bytes: closing a socket with unread bytes resets the connection,
        and the client would lose the response."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:
            return
        with suppress(OSError):  # nothing left to read
            for _ in range(DISCARDED_READS):
                if not os.read(sock.fileno(), READ_SIZE):
                    return


class _HttpServer(web.Server):
    """aiohttp server that has the request handler of `wrapped`. `options`: arguments of `HttpConnection`."""

    def __init__(self, wrapped: web.Server, connections: Connections, options: dict[str, Any]) -> None:
        super().__init__(
            wrapped.request_handler,
            request_factory=self._without_expect,
            handler_cancellation=wrapped.handler_cancellation,
        )
        self._make_wrapped, self._limits, self._options = wrapped.request_factory, connections, options

    def __call__(self) -> RequestHandler:
        return HttpConnection(self, self._limits, loop=asyncio.get_running_loop(), **self._options)

    def _without_expect(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        """Return the request without its `Expect` header, because aiohttp sends `100 Continue` before any middleware
        runs."""
        expects = message.headers.get("Expect")
        if expects is not None:
            headers = CIMultiDict(message.headers)
            del headers["Expect"]
            message = message._replace(headers=CIMultiDictProxy(headers))
        assert isinstance(protocol, HttpConnection)
        protocol.writes_with(writer)
        request = self._make_wrapped(message, payload, protocol, writer, task)
        if expects is not None and expects.lower() == "100-continue":
            request[EXPECTS] = True
        return request


class HttpRunner(CappedRunner):
    """A runner whose connections are `HttpConnection`s."""

    def __init__(
        self,
        app: web.Application,
        connections: Connections,
        *,
        write_timeout: float,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(app, connections, **options)
        for_connections = {name: value for name, value in options.items() if name not in RUNNER_OPTIONS}
        self._options = {**for_connections, "write_timeout": write_timeout}

    async def _make_server(self) -> web.Server:
        return _HttpServer(await super()._make_server(), self._connections, self._options)
