"""The API process's part of the daemon: tokenizer, registry and HTTP. It is a module of its own because its imports
take as long as its work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TypeVar

from aiohttp import web
from msgspec.structs import asdict

from coserve.api.app import make_app, make_runner
from coserve.api.engine_client import EngineClient
from coserve.api.http.limits import WAITING_CONNECTIONS
from coserve.api.http.server import quiet_accept
from coserve.api.metrics.traces import open_traces
from coserve.api.service import Service
from coserve.config import Config
from coserve.core.cancellation import cancel_all
from coserve.core.errors import ConfigError
from coserve.core.garbage import GarbageCollection, freeze_and_collect_young
from coserve.core.sampling import NEUTRAL, SamplingDefaults
from coserve.data.pretrained.generation_config import load_sampling_defaults
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.state.failpoints import failpoint
from coserve.state.folder import DataFolder
from coserve.state.registry.registry import Registry
from coserve.state.reserve import Reserve
from coserve.state.thread import RegistryThread

T = TypeVar("T")
log = logging.getLogger(__name__)


async def open_service(config: Config, folder: DataFolder, engine: EngineClient, stack: AsyncExitStack) -> Service:
    """Open the service over a data folder that is locked and recovered; `stack` closes it. Raises subclasses of
    `StartupError`."""
    tokenizer = await _in_daemon_thread(lambda: _load_tokenizer(config))
    defaults = await _in_daemon_thread(lambda: _load_sampling_defaults(config))
    registry = RegistryThread(lambda: Registry(folder.database), reserve=Reserve(folder.reserve))
    stack.push_async_callback(registry.close)
    service = Service(config, folder, registry, tokenizer, engine, sampling_defaults=defaults)
    stack.push_async_callback(service.close)  # closed after the engine, whose last messages it records
    if (traces := open_traces()) is not None:
        service.generation.traces = traces
        stack.callback(traces.close)
    await service.open()
    warming = asyncio.create_task(service.texts.read_template())
    stack.push_async_callback(cancel_all, [warming])
    return service


async def serve_http(service: Service, config: Config, sock: socket.socket, stack: AsyncExitStack) -> None:
    """Answer requests from now on, until `stack` closes."""
    asyncio.get_running_loop().set_exception_handler(quiet_accept())
    runner = make_runner(make_app(service, config, garbage=GarbageCollection()), config)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    freeze_and_collect_young()
    await web.SockSite(runner, sock, ssl_context=tls_context(config)).start()
    sock.listen(WAITING_CONNECTIONS)  # asyncio has set the backlog to what it accepts per loop iteration


def tls_context(config: Config) -> ssl.SSLContext | None:
    """Return the context for HTTPS, with Python's defaults (TLS 1.2 or later); None for HTTP. Raises `ConfigError`."""
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_cert: cannot use {config.tls_cert} with {config.tls_key}: {error}") from error
    return context


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread and return its result. The process can exit without waiting for it: a download may
    take minutes."""
    found: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        found.set_running_or_notify_cancel()  # from now on a result can be set, also if the waiter was cancelled
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001  # the waiting end raises it
            found.set_exception(error)

    threading.Thread(target=run, name="startup", daemon=True).start()
    return await asyncio.wrap_future(found)


def _load_tokenizer(config: Config) -> Tokenizer:
    failpoint("daemon.start")
    tokenizer = Tokenizer.load(config.model, trust_remote_code=config.trust_remote_code)
    return tokenizer if config.chat_template is None else tokenizer.with_chat_template(config.chat_template)


def _load_sampling_defaults(config: Config) -> SamplingDefaults:
    if config.generation_config == "none":
        return NEUTRAL
    found = load_sampling_defaults(config.model)
    if found != NEUTRAL:
        own = {name: value for name, value in asdict(found).items() if value != getattr(NEUTRAL, name)}
        log.info(
            "sampling defaults of the base: %s (--generation-config none: the API's)",
            ", ".join(f"{name} {value}" for name, value in own.items()),
        )
    return found
