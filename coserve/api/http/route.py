"""A route. The router, the gate and `/openapi.json` are made from the table of routes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from coserve.api.http.responses import NATIVE_ERRORS, ErrorFormat
from coserve.api.http.security import Handler

PAGE = ("after", "limit")
BODY_ERRORS = (408, 413, 415)
BUSY = 429
UNAVAILABLE = 503
ALWAYS = (400, 401, 403, 500, UNAVAILABLE)
"""Errors that every route may respond with: 503 comes when all connections are busy, too."""

Schema = type[msgspec.Struct] | tuple[type[msgspec.Struct], ...]
"""One type, or one of several."""


@dataclass(frozen=True)
class Route:
    """One method of one path. `errors`: statuses besides `ALWAYS`."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: Schema | None = None
    upload: bool = False
    """The body may be multipart/form-data too, with files."""
    response: Schema | None = None
    listed: bool = False
    """The response is a list of these."""
    status: int = 200
    events: Schema | None = None
    """Type of the server-sent events' data."""
    media: str | None = None
    """Content type of a response that is not JSON."""
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    """Headers that the request may have."""
    errors: tuple[int, ...] = ()
    starting: Schema | None = None
    """The body of a 503, besides an error's."""
    error_formats: tuple[ErrorFormat, ...] = (NATIVE_ERRORS,)
    """Formats of its error bodies; the gate uses the first."""
    slashes: bool = False
    """The last part of the path may contain slashes."""
    public: bool = False
    """Needs no API key. All other routes do."""

    @property
    def pattern(self) -> str:
        """The path for the router."""
        return self.path.replace("{id}", "{id:.+}") if self.slashes else self.path

    @property
    def name(self) -> str:
        """The name of the route in router, gate and metrics."""
        return self.handler.__name__
