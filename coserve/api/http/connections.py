"""Limits connections: closes idle ones for new ones, and keeps some file descriptors free."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import termios
import time
from array import array
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from coserve.api.http.limits import RESERVE
from coserve.api.http.responses import NATIVE_ERRORS
from coserve.api.http.security import Handler
from coserve.core.errors import TooManyConnections
from coserve.core.logs.throttled import ThrottledLog

log = logging.getLogger(__name__)

GRACE: Final = 1.0
"""Seconds without a request after which a connection may be closed for a new one."""
PROBES: Final = ("/health", "/health/ready")
OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class Connections:
    """Tracks all connections. At most `limit` of them are served; `clock` returns seconds."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._accepted: set[web.RequestHandler] = set()
        """Accepted in this event-loop iteration; they have no transport yet."""
        self._idle: dict[web.RequestHandler, float] = {}
        """Idle connections and since when, longest first."""
        self._begun: set[web.RequestHandler] = set()
        """Idle connections that have received part of a request."""
        self._busy: set[web.RequestHandler] = set()
        self._over_limit: set[web.RequestHandler] = set()
        """Connections beyond the limit: closed after their response, even if more of a body is to come."""
        self._refused = ThrottledLog(log, "connections refused: all are busy; see --max-connections", clock)

    def accept(self, make: Callable[[], web.RequestHandler]) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection: that of `make`, or one that refuses it."""
        self._idle = {handler: since for handler, since in self._idle.items() if handler.transport is not None}
        self._busy = {handler for handler in self._busy if handler.transport is not None}
        count = len(self._accepted) + len(self._idle) + len(self._busy)
        if count >= self._limit and not self._close_idle() and count >= self._limit + RESERVE:
            self._refused.warn()
            return _RejectProtocol()
        handler = make()
        self._accepted.add(handler)
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._made, handler)  # after `connection_made`, also a call_soon
        return handler

    def _made(self, handler: web.RequestHandler) -> None:
        self._accepted.discard(handler)
        if handler.transport is not None and handler not in self._busy:
            self._idle[handler] = self._clock()

    def _close_idle(self) -> bool:
        """Close the connection that has been idle longest; False if none may be closed."""
        for handler, since in self._idle.items():
            if self._clock() - since < GRACE:
                return False
            transport = cast("asyncio.Transport", handler.transport)
            # otherwise a response is still being sent, or a request has come
            if transport.get_write_buffer_size() == 0 and not _unread(transport):
                del self._idle[handler]
                handler.force_close()
                return True
        return False

    def middleware(self) -> Middleware:
        """Mark connections as busy until `response_sent`. Raises `TooManyConnections` beyond the limit."""

        @web.middleware
        async def connections(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = request.protocol
            self._idle.pop(connection, None)
            self._begun.discard(connection)
            self._busy.add(connection)
            if len(self._busy) > self._limit:
                self._over_limit.add(connection)
                if request.path in PROBES and request.method in ("GET", "HEAD"):
                    return await handler(request)
                self._refused.warn()
                raise TooManyConnections(f"{self._limit} connections are busy already")
            return await handler(request)

        return connections

    def received(self, connection: web.RequestHandler) -> None:
        """Note received bytes. The first bytes of a request restart the connection's idle time, so that the request can
        arrive whole."""
        if connection in self._idle and connection not in self._begun:
            self._begun.add(connection)
            del self._idle[connection]
            self._idle[connection] = self._clock()

    def closes(self, connection: web.RequestHandler) -> bool:
        """Return whether the connection is closed after its response."""
        return connection in self._over_limit

    def response_sent(self, connection: web.RequestHandler) -> None:
        """Note that the response was sent, usually after the middleware returned: the connection is idle if it is still
        open."""
        self._busy.discard(connection)
        self._begun.discard(connection)
        self._idle.pop(connection, None)
        if connection in self._over_limit:
            self._over_limit.discard(connection)
            connection.force_close()
        elif connection.transport is not None:
            self._idle[connection] = self._clock()

    def lost(self, connection: web.RequestHandler) -> None:
        for known in (self._over_limit, self._busy, self._begun):
            known.discard(connection)
        self._idle.pop(connection, None)


def _unread(transport: asyncio.Transport) -> bool:
    """Return whether bytes wait in the socket."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    size = array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.FIONREAD, size)
    return size[0] > 0


class CappedRunner(web.AppRunner):
    """A runner whose sites accept connections through `Connections`."""

    def __init__(self, app: web.Application, connections: Connections, **options: Any) -> None:  # noqa: ANN401
        super().__init__(app, **options)
        self._connections = connections

    @property
    def server(self) -> web.Server | None:
        """Protocol factory for a site's connections."""
        server = super().server
        if server is None:
            return None
        return cast("web.Server", lambda: self._connections.accept(server))


class _RejectProtocol(asyncio.Protocol):
    """Sends a 503 without reading anything, then closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        body = msgspec.json.encode(NATIVE_ERRORS.make(TooManyConnections("all connections are busy")))
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 2\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        stream = cast("asyncio.Transport", transport)
        stream.write(head.encode() + body)
        stream.close()


def quiet_accept(clock: Callable[[], float] = time.monotonic) -> Callable[[asyncio.AbstractEventLoop, Any], None]:
    """Return an exception handler for the event loop that limits the log lines for connections that cannot be accepted
    for lack of descriptors."""
    throttled = ThrottledLog(
        log, "connections cannot be accepted: the machine is out of file descriptors or memory", clock
    )

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        of_accept = context.get("message") == "socket.accept() out of system resource"
        if of_accept and isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES:
            throttled.warn()
        else:
            loop.default_exception_handler(context)

    return handle
