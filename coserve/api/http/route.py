"""The route type. The router, the access check (`Gate`) and `/openapi.json` are generated from the handlers' routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import TypeVar, get_type_hints

import msgspec
from aiohttp import web

from coserve.api.http.bodies import BodyReader
from coserve.api.http.responses import NATIVE_ERRORS, ErrorFormat, json_response
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
Method = Callable[..., Awaitable[web.StreamResponse | msgspec.Struct]]
MethodT = TypeVar("MethodT", bound=Method)


async def no_handler(request: web.Request) -> web.StreamResponse:
    """Placeholder of a route whose method is not bound to an object yet."""
    raise NotImplementedError


@dataclass(frozen=True)
class Route:
    """One method of one path. As a decorator it describes the method of a class that handles the route.

    The method may have the arguments `request`, `id` (from the path) and `body`, whose type is that of the decoded JSON
    body. It returns a struct, which is sent as JSON, or a response of aiohttp. `body` and
    `response` are given only where the method's annotations do not say them.
    """

    method: str
    path: str
    summary: str
    handler: Handler = no_handler
    body: Schema | None = None
    dialect: bool = False
    """Whether the body may have unknown fields with empty values, as clients of other servers send them."""
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

    def __call__(self, method: MethodT) -> MethodT:
        hints = get_type_hints(method)
        response = self.response if issubclass(hints["return"], web.StreamResponse) else hints["return"]
        setattr(method, _ATTACHED, replace(self, body=hints.get("body", self.body), response=response))
        return method

    @property
    def statuses(self) -> list[int]:
        """Statuses of all errors that the route may respond with."""
        of_path = (404,) if "{" in self.path else ()
        of_body = () if self.body is None and self.form is None else BODY_ERRORS
        return sorted({*ALWAYS, *of_path, *of_body, *self.errors})

    @property
    def error_bodies(self) -> tuple[type[msgspec.Struct], ...]:
        return tuple(error_format.body for error_format in self.error_formats)

    @property
    def pattern(self) -> str:
        return self.path.replace("{id}", "{id:.+}") if self.slashes else self.path

    @property
    def name(self) -> str:
        """Name of the route in router, gate and metrics."""
        return self.handler.__name__


_ATTACHED = "route"
"""Attribute of a method that holds its route."""


def routes_of(apis: Iterable[object], bodies: BodyReader) -> tuple[Route, ...]:
    """Return the routes of these objects' methods, in the order of their definition."""
    found = ((api, name, getattr(method, _ATTACHED, None)) for api in apis for name, method in vars(type(api)).items())
    return tuple(
        replace(route, handler=_handler(route, getattr(api, name), bodies))
        for api, name, route in found
        if isinstance(route, Route)
    )


def _handler(route: Route, method: Method, bodies: BodyReader) -> Handler:
    """Return the handler that calls a method with the arguments it has, and sends what it returns."""
    wanted = get_type_hints(method)

    @wraps(method)
    async def handler(request: web.Request) -> web.StreamResponse:
        given: dict[str, object] = {"request": request} if "request" in wanted else {}
        if "id" in wanted:
            given["id"] = request.match_info["id"]
        if "body" in wanted:
            given["body"] = await bodies.read(request, wanted["body"], dialect=route.dialect)
        answer = await method(**given)
        return answer if isinstance(answer, web.StreamResponse) else json_response(answer, status=route.status)

    return handler


def tagged(groups: Mapping[str, Iterable[object]], bodies: BodyReader) -> tuple[Route, ...]:
    """Return the routes of all groups of objects in order, each with the name of its group as its tag."""
    return tuple(replace(route, tag=tag) for tag, apis in groups.items() for route in routes_of(apis, bodies))
