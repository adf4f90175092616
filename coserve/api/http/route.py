"""The route type. The router, the access check (`Gate`) and `/openapi.json` are generated from the handlers' routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
from aiohttp import web

from coserve.api.http.responses import NATIVE_ERRORS, ErrorFormat
from coserve.api.http.security import Handler

PAGE = ("after", "limit")
BODY_ERRORS = (408, 413, 415)
"""Errors that every route with a body may respond with."""
BUSY = 429
UNAVAILABLE = 503
ALWAYS = (400, 401, 403, BUSY, 500, UNAVAILABLE)
"""Errors that every route may respond with; 429 for a project's quota, 503 also when all connections are busy."""

Schema = type[msgspec.Struct] | tuple[type[msgspec.Struct], ...]
"""One body type, or several alternatives."""
T = TypeVar("T")


async def no_handler(request: web.Request) -> web.StreamResponse:
    """Placeholder of a route whose method is not bound to an object yet."""
    raise NotImplementedError


@dataclass(frozen=True)
class Route:
    """One method of one path. As a decorator it describes the method that handles the route: see `routes_of`."""

    method: str
    path: str
    summary: str
    handler: Handler = no_handler
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
    """Statuses of errors that do not follow from the path and the body: see `statuses`."""
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

    def __call__(self, handler: T) -> T:
        """Attach the route to a method of a class."""
        setattr(handler, _ATTACHED, self)
        return handler

    @property
    def statuses(self) -> list[int]:
        """Statuses of all errors that the route may respond with."""
        of_path = (404,) if "{" in self.path else ()
        of_body = () if self.body is None and self.form is None else BODY_ERRORS
        return sorted({*ALWAYS, *of_path, *of_body, *self.errors})

    @property
    def pattern(self) -> str:
        """Path pattern for the router."""
        return self.path.replace("{id}", "{id:.+}") if self.slashes else self.path

    @property
    def name(self) -> str:
        """Name of the route in router, gate and metrics."""
        return self.handler.__name__


_ATTACHED = "route"
"""Attribute of a method that holds its route."""


def routes_of(*apis: object) -> tuple[Route, ...]:
    """Return the routes of these objects' methods, in the order of their definition."""
    found = ((api, name, getattr(method, _ATTACHED, None)) for api in apis for name, method in vars(type(api)).items())
    return tuple(replace(route, handler=getattr(api, name)) for api, name, route in found if isinstance(route, Route))


def tagged(groups: Mapping[str, Iterable[object]]) -> tuple[Route, ...]:
    """Return the routes of all groups of objects in order, each with the name of its group as its tag."""
    return tuple(replace(route, tag=tag) for tag, apis in groups.items() for route in routes_of(*apis))
