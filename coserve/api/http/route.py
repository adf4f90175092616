"""The route type. The router, the access check (`Gate`) and `/openapi.json` are generated from the table of routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from coserve.api.http.responses import NATIVE_ERRORS, ErrorFormat
from coserve.api.http.security import Handler

PAGE = ("after", "limit")
BODY_ERRORS = (408, 413, 415)
BUSY = 429
UNAVAILABLE = 503
ALWAYS = (400, 401, 403, BUSY, 500, UNAVAILABLE)
"""Errors that every route may respond with; 429 for a project's quota, 503 also when all connections are busy."""

Schema = type[msgspec.Struct] | tuple[type[msgspec.Struct], ...]
"""One body type, or several alternatives."""


@dataclass(frozen=True)
class Route:
    """One method of one path. `errors`: possible statuses in addition to `ALWAYS`."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: Schema | None = None
    upload: tuple[str, ...] = ()
    """Names of the file parts if the body may also be multipart/form-data: `file`, which is required, then optional
    ones."""
    form: type[msgspec.Struct] | None = None
    """Fields of a body that is multipart/form-data with one file, the part `file`."""
    response: Schema | None = None
    listed: bool = False
    """Whether the response is a list of the response type."""
    status: int = 200
    events: Schema | None = None
    """Type of the server-sent events' data, if the route sends any."""
    stream_end: bool = False
    """Whether the last event is `[DONE]`."""
    media: str | None = None
    """Content type of a response that is not JSON."""
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    """Request headers that the route reads."""
    errors: tuple[int, ...] = ()
    starting: Schema | None = None
    """Body of a 503 that is a status instead of an error."""
    error_formats: tuple[ErrorFormat, ...] = (NATIVE_ERRORS,)
    """Formats of the route's error bodies; the gate uses the first."""
    slashes: bool = False
    """Whether the last part of the path may contain slashes."""
    compressed: bool = False
    """Whether the body may have a `Content-Encoding`, which the handler checks."""
    public: bool = False
    """Whether the route needs no API key."""
    tag: str = ""
    """Tag of the route in the OpenAPI description."""

    @property
    def pattern(self) -> str:
        """Path pattern for the router."""
        return self.path.replace("{id}", "{id:.+}") if self.slashes else self.path

    @property
    def name(self) -> str:
        """Name of the route in router, gate and metrics."""
        return self.handler.__name__


def tagged(groups: Mapping[str, Iterable[Route]]) -> tuple[Route, ...]:
    """Return the routes of all groups in order, each with the name of its group as its tag."""
    return tuple(replace(route, tag=tag) for tag, routes in groups.items() for route in routes)
