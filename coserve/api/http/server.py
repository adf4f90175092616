"""Limits that aiohttp does not set on connections: their number, bytes read at once, and clients that stop reading. On
the open internet, put a proxy that buffers whole requests in front (docs/guide/operate.md). Also collects the process's
garbage while no request is in progress."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import socket
import termios
import time
from array import array
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec
from aiohttp import web

from coserve.api.http.limits import RESERVE
from coserve.api.http.responses import NATIVE_ERRORS
from coserve.api.http.security import Handler
from coserve.core.errors import TooManyConnections
from coserve.core.garbage import IDLE, GarbageCollection
from coserve.core.logs import ThrottledLog

log = logging.getLogger(__name__)

GRACE: Final = 1.0
"""Seconds without a request after which a connection may be closed for a new one."""
SETTLE: Final = 0.01
"""Seconds to wait before closing an idle connection, so that a request already received reaches its handler: several
event-loop iterations."""
PROBES: Final = ("/health", "/health/ready", "/ping")
OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
READ_SIZE: Final = 8 << 10
"""Bytes received and parsed per event-loop iteration: HTTP chunks of one byte cost some µs each to parse."""


class Connections:
    """Counts connections; at most `limit` of them are served. `timeout`: seconds that sent bytes may stay
    unacknowledged (TCP_USER_TIMEOUT); `clock` returns seconds; a full collection of `garbage`, which blocks the event
    loop, runs once no request was in progress for `IDLE` seconds."""

    def __init__(
        self,
        limit: int,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        garbage: GarbageCollection | None = None,
    ) -> None:
        self._limit, self._timeout, self._clock = limit, timeout, clock
        self._garbage = garbage or GarbageCollection.none()
        self._collection: asyncio.TimerHandle | None = None
        self._accepted: set[web.RequestHandler] = set()
        """Accepted in this event-loop iteration; they have no transport yet."""
        self._idle: dict[web.RequestHandler, float] = {}
        """Connections without a request in progress and since when, longest first."""
        self._busy: set[web.RequestHandler] = set()
        self._refused = ThrottledLog(log, "connections refused: all are busy; see --max-connections", clock)

    def accept(self, make: Callable[[], web.RequestHandler]) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection: that of `make`, or one that refuses it."""
        self._idle = {handler: since for handler, since in self._idle.items() if handler.transport is not None}
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
        if handler not in self._busy:
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
                transport.pause_reading()
                asyncio.get_running_loop().call_later(SETTLE, self._close, handler)
                return True
        return False

    def _close(self, handler: web.RequestHandler) -> None:
        """Close a connection, unless a request has come: one that was read before the pause is in progress by now."""
        if (transport := handler.transport) is None:
            return
        busy = handler in self._busy
        if not busy and handler not in self._idle and not _unread(transport):
            handler.force_close()
            return
        transport.resume_reading()
        if not busy:
            self._idle[handler] = self._clock()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Mark a connection as busy from its request to the end of the response. It is the outermost middleware."""
        connection = request.protocol
        self._accepted.discard(connection)
        self._idle.pop(connection, None)
        self._busy.add(connection)
        if self._collection is not None:
            self._collection.cancel()
            self._collection = None
        self._set_limits(request.transport)
        try:
            response = await handler(request)
            if len(self._busy) > self._limit:
                response.force_close()
            await response.prepare(request)
            await response.write_eof()
        finally:
            self._busy.discard(connection)
            self._idle[connection] = self._clock()
            self._garbage.while_busy()
            if not self._busy and self._garbage.full_due:
                self._collection = asyncio.get_running_loop().call_later(IDLE, self._garbage.collect_all)
        return response

    def _set_limits(self, transport: asyncio.Transport | None) -> None:
        """Limit the bytes read per event-loop iteration, and how long sent bytes may stay unacknowledged."""
        if transport is None:
            return
        if hasattr(transport, "max_size"):  # asyncio's own transports
            transport.max_size = READ_SIZE
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0 and hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._timeout))

    def check(self, request: web.Request) -> None:
        """Raise `TooManyConnections` beyond the limit, except for probes."""
        if len(self._busy) > self._limit and not (request.path in PROBES and request.method in ("GET", "HEAD")):
            self._refused.warn()
            raise TooManyConnections(f"{self._limit} connections are busy already")


def _unread(transport: asyncio.Transport) -> bool:
    """Return whether bytes wait in the socket."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    size = array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.FIONREAD, size)
    return size[0] > 0


async def keep_waiting(request: web.Request) -> None:
    """Handle a request's `Expect` header by sending nothing yet: see `ask_for_body`."""


async def ask_for_body(request: web.Request) -> None:
    """Send `100 Continue` to a client that waits for it before it sends the body: host, key and size were checked."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


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
