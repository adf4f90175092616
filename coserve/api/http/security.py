"""Middleware before every handler: checks API key, host and origin, and gives all errors one format.

Authorisation depends on the route that matched, never on the path's text, and denies by default: a route is open only
if its `Route` says so, and unknown paths also need the key.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from coserve.api.http.responses import ErrorFormat, error_response
from coserve.config import Config
from coserve.core import errors

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
REQUEST_ID = web.RequestKey("request_id", str)
CLIENT_ID = re.compile(r"[!-~]{1,128}")
"""An `X-Request-Id` of a client that the log and the response take over; instead of another one they have a new id."""
BEGUN = web.RequestKey("begun", bool)
"""Set once the response's headers are sent: no other response is possible."""

ORIGIN = web.RequestKey("origin", str)
"""Origin of the page that sent the request, where it is one that may."""


def is_preflight(request: web.Request) -> bool:
    """Return whether a browser asks what a page may send. Such a request has no API key, and reaches no handler."""
    asks = {"Origin", "Access-Control-Request-Method"}
    return request.method == "OPTIONS" and all(name in request.headers for name in asks)


class Gate:
    """Checks a request's host, origin, API key and content encoding. `public`: names of the routes that need no key;
    `identify(request, public)`: sets the request's principal, and raises if a route that is not public may not be used
    with its key; `compressed`: names of the routes whose bodies may have a content encoding."""

    def __init__(
        self,
        config: Config,
        public: frozenset[str],
        identify: Callable[[web.Request, bool], None],
        compressed: frozenset[str],
    ) -> None:
        self._hosts = LOOPBACK | {host.lower() for host in config.allowed_hosts}
        address = _address(config.host)
        if config.host and not (address and address.is_unspecified):
            self._hosts |= {config.host.lower()}
        self._origins = frozenset(map(_normalized, config.allowed_origins))
        self._public, self._identify, self._compressed = public, identify, compressed

    def check(self, request: web.Request) -> None:
        """Raise `ForbiddenOrigin`, `Unauthorized`, `MissingScope` or `UnsupportedEncoding` for a request that fails a
        check."""
        public = request.match_info.route.name in self._public
        host = _host(f"//{request.headers.get('Host', '')}")
        # Probes use the daemon's address as host, or none. DNS rebinding, which this check prevents, needs a host name.
        probes = public and ("Host" not in request.headers or _address(host) is not None)
        if host not in self._hosts and not probes:
            raise errors.ForbiddenOrigin(
                "the Host header names none of this daemon's hosts; see --allowed-hosts", field="Host"
            )
        origin = request.headers.get("Origin")
        if origin is not None:
            if not self._may_use(origin):
                said = "pages of this origin may not use the daemon; see --allowed-origins"
                raise errors.ForbiddenOrigin(said, field="Origin")
            request[ORIGIN] = origin
        if is_preflight(request):
            return
        self._identify(request, public)
        if "Content-Encoding" in request.headers and request.match_info.route.name not in self._compressed:
            raise errors.UnsupportedEncoding("compressed bodies are not accepted", field="Content-Encoding")

    def _may_use(self, origin: str) -> bool:
        """Return whether pages of an origin may use the daemon: those that the settings name, and those of the daemon's
        own names, with any scheme and port."""
        own = origin.startswith(("http://", "https://")) and _host(origin) in self._hosts
        return own or "*" in self._origins or _normalized(origin) in self._origins


def _normalized(origin: str) -> str:
    """Return an origin as browsers send it: in lower case, without the scheme's default port."""
    origin = origin.lower()
    return origin.removesuffix(":443" if origin.startswith("https:") else ":80")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a host is; None: it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _host(url: str) -> str:
    """Return the host of a URL; empty for a text that is not a URL."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for an invalid port
    except ValueError:
        return ""
    if parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        return ""
    return (parts.hostname or "").lower()


def guard(
    check: Callable[[web.Request], Awaitable[None]],
    count: Callable[[str, int], None],
    format_of: Callable[[web.Request], ErrorFormat],
    no_such_path: Callable[[str], errors.NotFound],
) -> Middleware:
    """Return the middleware. `check` raises for a request that is refused before its body is read; `count` gets the
    route and status of each response; `format_of` gives a request's error format, `no_such_path` the error for a path
    without a route."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-Id", "")
        request[REQUEST_ID] = given if CLIENT_ID.fullmatch(given) else secrets.token_hex(8)
        error_format = format_of(request)
        try:
            await request.writer.drain()  # earlier responses of this connection that are not read yet
            await check(request)
            response = _allowed(request) if is_preflight(request) else await handler(request)
        except errors.CoserveError as error:
            response = _respond(request, error, error_format)
        except web.HTTPException as error:
            response = error_response(_translate(error, lambda: no_such_path(request.path)), error_format)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except ConnectionError:
            raise  # the client is gone
        except Exception:  # any other fault is ours: the client gets a fixed body
            log.exception("request %s failed", request[REQUEST_ID])
            if BEGUN in request:
                raise ConnectionResetError("the response broke off") from None
            response = _respond(request, errors.InternalError("internal error"), error_format)
        if response.status in (401, 403, 408, 413, 415):
            response.force_close()  # the rest of the body is not read
        count(request.match_info.route.name or "none", response.status)
        return response

    return middleware


def _allowed(request: web.Request) -> web.Response:
    """Return the answer to a preflight: everything that the API has."""
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, PUT, PATCH, DELETE",
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "*"),
        "Access-Control-Max-Age": "600",
    }
    return web.Response(status=204, headers=headers)


def _respond(request: web.Request, error: errors.CoserveError, error_format: ErrorFormat) -> web.StreamResponse:
    if error.status >= 500 and not isinstance(error, errors.TooManyConnections):  # logged elsewhere, once for a flood
        log.warning("request %s: %s: %s", request[REQUEST_ID], error.code, error.message)
    response = error_response(error, error_format)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _translate(error: web.HTTPException, no_such_path: Callable[[], errors.NotFound]) -> errors.CoserveError:
    """Return our error for one of aiohttp's own."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        return errors.MethodNotAllowed(
            f"expected {' or '.join(sorted(error.allowed_methods))}, got {error.method[:80]}"
        )
    match error.status:
        case 404:
            return no_such_path()
        case 413:
            return errors.BodyTooLarge("the body is too large")
        case status if status < 500:
            return errors.InvalidRequest(f"the request is refused: {error.reason}")
    return errors.InternalError("internal error")


async def finish_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler, called before the headers of any response are sent."""
    request[BEGUN] = True
    response.headers["X-Request-Id"] = request.get(REQUEST_ID, "")
    response.headers["X-Content-Type-Options"] = "nosniff"
    if ORIGIN in request:
        response.headers["Access-Control-Allow-Origin"] = request[ORIGIN]
        response.headers["Access-Control-Expose-Headers"] = "*"
        response.headers.add("Vary", "Origin")
    response.headers.pop("Server", None)
