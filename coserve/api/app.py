"""The aiohttp application: the routes behind the gate, and the server's limits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import cache

import msgspec
from aiohttp import web

from coserve.api.access.access import AccessLogger
from coserve.api.anthropic.handlers import AnthropicApi
from coserve.api.http.bodies import BodyReader
from coserve.api.http.limits import STREAMS_TIMEOUT
from coserve.api.http.openapi import describe_api
from coserve.api.http.responses import NATIVE_ERRORS, ErrorFormat
from coserve.api.http.route import Route, tagged
from coserve.api.http.security import Gate, finish_headers, guard, is_preflight
from coserve.api.http.server import CappedRunner, Connections, keep_waiting
from coserve.api.http.sse import WRITE_TIMEOUT
from coserve.api.http.uploads import UploadReader
from coserve.api.native.handlers import NativeApi
from coserve.api.openai.batches.handlers import BatchesApi, batch_answers
from coserve.api.openai.batches.runner import BatchRunner
from coserve.api.openai.batches.store import BatchStore
from coserve.api.openai.errors import OPENAI_ERRORS, is_openai, no_such_path
from coserve.api.openai.files.handlers import FilesApi
from coserve.api.openai.finetuning.handlers import FineTuningApi
from coserve.api.openai.handlers import OpenAIApi
from coserve.api.openai.lora import LoraApi
from coserve.api.openai.models import ModelsApi
from coserve.api.openai.responses.handlers import ResponsesApi
from coserve.api.page.handlers import PageApi
from coserve.api.service import Service
from coserve.api.sessions.handlers import SessionsApi
from coserve.api.tgi.handlers import TgiApi
from coserve.api.tinker.handlers import TinkerApi
from coserve.api.tokenizer.handlers import MAX_TEXTS, TokenizerApi
from coserve.config import Config
from coserve.core.garbage import GarbageCollection
from coserve.core.logs import ACCESS

CONNECTIONS = web.AppKey("connections", Connections)
SERVICE = web.AppKey("service", Service)
ROUTES = web.AppKey("routes", tuple[Route, ...])


def make_app(
    service: Service,
    config: Config,
    clock: Callable[[], float] = time.monotonic,
    *,
    max_texts: int = MAX_TEXTS,
    garbage: GarbageCollection | None = None,
) -> web.Application:
    """The application over a service. The caller opens and closes the service. `clock`: seconds, for idle connections;
    `max_texts`: most texts that `/tokenize` and `/detokenize` handle concurrently; `garbage` is collected while no
    request is in progress (None: left to the interpreter)."""
    bodies = BodyReader(service.helpers, max_body_bytes=config.max_body_bytes, read_timeout=config.read_timeout)
    uploads = UploadReader(bodies, max_body_bytes=config.max_body_bytes, read_timeout=config.read_timeout)
    tgi, tinker = TgiApi(service, config), TinkerApi(service, bodies)
    native = NativeApi(service, bodies, uploads, tgi)
    openai, tokenizer = OpenAIApi(service, config, bodies), TokenizerApi(service, bodies, max_texts=max_texts)
    responses = ResponsesApi(openai)
    answers = batch_answers(openai, responses, bodies)
    batches = BatchRunner(BatchStore(service.folder.batches), service.files, answers, service.access.quotas.admit)
    described = tagged(
        {
            "coserve": (native, service.aliases),
            "Web page": (PageApi(service.history, native.pointers),),
            "LoRAX and TGI": (tgi,),
            "OpenAI": (
                openai,
                ModelsApi(service),
                LoraApi(service, config, bodies, uploads),
                responses,
                BatchesApi(batches),
                FilesApi(service, uploads),
                FineTuningApi(service),
            ),
            "Anthropic": (AnthropicApi(openai, tokenizer),),
            "Training sessions": (SessionsApi(service, bodies),),
            "Tinker": (tinker,),
            "Tokenizer": (tokenizer,),
            "Administration": (service.access,),
        },
        bodies,
    )

    routes, access = _with_description(described), service.access
    gate = Gate(
        config,
        frozenset(route.name for route in routes if route.public),
        access.identify,
        frozenset(route.name for route in routes if route.compressed),
    )
    formats = {route.name: route.error_formats[0] for route in routes}

    def format_of(request: web.Request) -> ErrorFormat:
        default = OPENAI_ERRORS if is_openai(request.path) else NATIVE_ERRORS
        return formats.get(request.match_info.route.name or "", default)

    connections = Connections(config.max_connections, config.read_timeout, clock, garbage)

    async def check(request: web.Request) -> None:
        gate.check(request)
        connections.check(request)
        if not is_preflight(request):
            await access.admit(request)

    fixed = [route.path for route in routes if "{" not in route.path]
    guarded = guard(check, service.metrics.responded, format_of, lambda path: no_such_path(path, fixed))
    app = web.Application(middlewares=[connections.middleware, access.middleware, guarded])
    app[SERVICE], app[ROUTES], app[CONNECTIONS] = service, routes, connections
    app[WRITE_TIMEOUT] = config.read_timeout
    _add_routes(app, routes)
    app.on_response_prepare.append(finish_headers)
    app.on_response_prepare.append(access.add_headers)
    _open_and_close(app, batches, tinker)
    return app


def _with_description(described: tuple[Route, ...]) -> tuple[Route, ...]:
    """Return the routes, and one more with the OpenAPI document of all."""

    @cache
    def document() -> bytes:
        """Build the OpenAPI document as JSON; takes longer than the event loop may block."""
        return msgspec.json.encode(describe_api(routes))

    async def openapi(request: web.Request) -> web.StreamResponse:
        return web.Response(body=await asyncio.to_thread(document), content_type="application/json")

    routes = (
        *described,
        Route("GET", "/openapi.json", "This description", openapi, tag="coserve"),
    )  # the document describes its own route, too
    return routes


def _add_routes(app: web.Application, routes: tuple[Route, ...]) -> None:
    for route in routes:
        resource = app.router.add_resource(route.pattern, name=route.name)
        resource.add_route(route.method, route.handler, expect_handler=keep_waiting)
        if route.public and route.method == "GET":
            resource.add_route("HEAD", route.handler, expect_handler=keep_waiting)  # some probes use it


def _open_and_close(app: web.Application, batches: BatchRunner, tinker: TinkerApi) -> None:
    """Open the service and its batches when the application starts; end what is in progress when it shuts down."""
    service = app[SERVICE]

    async def start(_: web.Application) -> None:
        await service.open()
        await batches.open()

    async def stop(_: web.Application) -> None:
        await batches.close()
        service.stop()  # ends requests in flight with an error, and event streams with an error event
        await tinker.close()

    service.background.append(batches.close)
    app.on_startup.append(start)
    app.on_shutdown.append(stop)


def make_runner(app: web.Application, config: Config) -> web.AppRunner:
    """Make the runner, with limits that aiohttp does not set: a cap on connections, a deadline for headers, no
    decompression, no log floods."""
    quiet = logging.getLogger("coserve.http")
    quiet.setLevel(
        logging.CRITICAL
    )  # aiohttp logs a traceback for every malformed request; the gate logs our own faults
    return CappedRunner(
        app,
        app[CONNECTIONS],
        # Headers must arrive within this time from the connection's first byte, or after the response before.
        keepalive_timeout=config.read_timeout,
        lingering_time=min(2.0, config.read_timeout),
        handler_cancellation=True,  # a client that disconnects cancels its request
        auto_decompress=False,
        access_log=logging.getLogger(ACCESS) if config.access_log else None,
        access_log_class=AccessLogger,
        logger=quiet,
        shutdown_timeout=STREAMS_TIMEOUT,
    )
