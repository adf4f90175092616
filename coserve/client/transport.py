"""Transports of the SDK: one method sends a request and returns a response with a streaming body."""

from __future__ import annotations

import errno
import inspect
import io
import os
import resource
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol
from weakref import WeakSet

import aiohttp
from yarl import URL

from coserve.core.errors import InvalidRequest, Unreachable

CONNECT_TIMEOUT = 10.0
FEW_CONNECTIONS = 100
"""Minimum number of simultaneous connections, also if the process may open few files."""


@dataclass(frozen=True)
class Upload:
    """A multipart body. `settings`: the part of this name, JSON; `files`: file name and content of each part `file`;
    `validation`: content of the part of this name."""

    settings: bytes
    files: tuple[tuple[str, bytes | Path], ...]
    validation: bytes | Path | None = None


@dataclass(frozen=True)
class Request:
    """One HTTP request. `path` starts with a slash and is already quoted; a body of bytes is JSON."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | Upload | None = None

    @property
    def repeatable(self) -> bool:
        """Whether sending the request twice has the same effect as once."""
        return self.method == "GET" or "Idempotency-Key" in self.headers

    @property
    def ends_with_its_connection(self) -> bool:
        """Whether its work ends without effect when the connection breaks."""
        return self.path == "/generate"


class Response:
    """A response. Its body can be read once, by `read` or by iteration; that, or `close`, releases the connection.
    Header names are lower-case."""

    def __init__(
        self,
        status: int,
        headers: Mapping[str, str] | None = None,
        body: bytes | AsyncIterator[bytes] = b"",
        *,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in (headers or {}).items()}
        self._body, self._close = body, close

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the body in chunks. Raises `Unreachable` if the connection breaks."""
        try:
            if isinstance(self._body, bytes):
                yield self._body
            else:
                async for chunk in self._body:
                    yield chunk
        finally:
            self.close()

    async def read(self) -> bytes:
        """Return the whole body."""
        return b"".join([chunk async for chunk in self])

    def close(self) -> None:
        self._close()


class Transport(Protocol):
    """Sends requests. Raises only `Unreachable`, if no response comes."""

    async def send(self, request: Request) -> Response: ...


class HttpTransport:
    """A transport over HTTP with kept-alive connections, one per simultaneous request, up to half of the process's
    limit of open files. Raises `InvalidRequest` for a `base_url` that is not a URL.

    `read_timeout`: seconds of silence after which a connection is closed.

    The session opens with the first request, so that the object may be made outside an event loop.
    """

    def __init__(self, base_url: str, *, read_timeout: float) -> None:
        _check_url(base_url)
        self._base_url, self._read_timeout = base_url.rstrip("/"), read_timeout
        self._session: aiohttp.ClientSession | None = None
        self._answers = WeakSet[aiohttp.ClientResponse]()
        """Responses whose body may still be read."""

    async def send(self, request: Request) -> Response:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=self._read_timeout)
            connector = aiohttp.TCPConnector(limit=most_connections())
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        opened: list[Callable[[], None]] = []
        kind = {"Content-Type": "application/json"} if isinstance(request.body, bytes) else {}
        try:
            response = await self._session.request(
                request.method,
                self._base_url + request.path,
                params=request.query,
                headers={**kind, **request.headers},
                data=_payload(request.body, opened),
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(_no_connection(self._base_url, error)) from error
        except TimeoutError as error:
            raise Unreachable(f"the connection to {self._base_url} broke: {_name(error)}", sent=True) from error
        except aiohttp.ClientError as error:  # for example, the daemon has closed an idle connection
            sent = not request.ends_with_its_connection
            raise Unreachable(f"the connection to {self._base_url} broke: {_name(error)}", sent=sent) from error
        finally:
            for close in opened:
                close()
        self._answers.add(response)
        return Response(response.status, response.headers, _chunks(response), close=response.close)

    async def close(self) -> None:
        for response in list(self._answers):  # aiohttp would let their readers wait forever
            response.content.set_exception(aiohttp.ClientConnectionError("the connections are closed"))
        if self._session is not None:
            await self._session.close()
            self._session = None


def most_connections() -> int:
    """Return the maximum number of connections of a client; 0: no limit. It is half of the process's limit of open
    files. Requests beyond it wait in the client, where the daemon can neither see nor refuse them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft == resource.RLIM_INFINITY else max(FEW_CONNECTIONS, soft // 2)


def _check_url(text: str) -> None:
    if not _is_url(text):
        meant = f"http://{text}"
        hint = f"; did you mean {meant!r}?" if "://" not in text and _is_url(meant) else ""
        raise InvalidRequest(f"expected a URL like http://127.0.0.1:8000, got {text!r}{hint}", field="base_url")
    root = text.rstrip("/").removesuffix("/v1")
    if root != text.rstrip("/"):
        raise InvalidRequest(
            f"expected the daemon's own URL, {root!r}, got {text!r}: /v1 is for OpenAI's clients", field="base_url"
        )


def _is_url(text: str) -> bool:
    try:
        url = URL(text)
        return url.scheme in ("http", "https") and bool(url.host) and url.port is not None
    except ValueError:
        return False


def _address(base_url: str) -> str:
    """Return `host:port`."""
    url = URL(base_url)
    host = url.host or ""
    return f"[{host}]:{url.port}" if ":" in host else f"{host}:{url.port}"


def _no_connection(base_url: str, error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) -> str:
    address, reason = _address(base_url), _reason(error)
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            f"no connection to {address}: {reason}: each request at a time takes one, and this process may open no more"
        )
    if isinstance(getattr(error, "os_error", None), ssl.SSLError):
        return f"no TLS with {address}: {reason}; SSL_CERT_FILE names a certificate to trust, http:// is without TLS"
    return f"no daemon answers at {address}: {reason}; check that it runs and that the URL is right"


def _reason(error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) -> str:
    """Return the system's reason for a failed connection. A TLS error's number is OpenSSL's, not the system's."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection within {CONNECT_TIMEOUT:g} s"
    cause = getattr(error, "os_error", None)  # missing in errors about certificates
    if not isinstance(cause, OSError):
        return str(error)
    if isinstance(cause, ssl.SSLError) or not cause.errno or cause.errno < 0:
        return cause.strerror or str(cause)
    return os.strerror(cause.errno)


def _payload(body: bytes | Upload | None, opened: list[Callable[[], None]]) -> bytes | aiohttp.FormData | None:
    if not isinstance(body, Upload):
        return body
    form = aiohttp.FormData(default_to_multipart=True)
    form.add_field("settings", body.settings.decode(), content_type="application/json")
    held = () if body.validation is None else (("validation", "validation", body.validation),)
    for part, name, content in (*(("file", *file) for file in body.files), *held):
        if isinstance(content, bytes):
            file: IO[bytes] = io.BytesIO(content)  # a file is sent in chunks, bytes would be sent at once
        else:
            file = content.open("rb")
            opened.append(file.close)
        form.add_field(part, file, filename=name, content_type="application/octet-stream")
    return form


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.content.iter_any():
            yield chunk
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unreachable(f"the response broke off: {_name(error)}", sent=True) from error


def _name(error: BaseException) -> str:
    return str(error) or type(error).__name__


class MockTransport:
    """A transport for tests: a function replaces the daemon. Requests are recorded in `requests`."""

    def __init__(self, respond: Callable[[Request], Response | Awaitable[Response]]) -> None:
        self._respond = respond
        self.requests: list[Request] = []

    async def send(self, request: Request) -> Response:
        self.requests.append(request)
        response = self._respond(request)
        return await response if inspect.isawaitable(response) else response
