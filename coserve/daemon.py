"""The daemon: startup, serve, shutdown. One API process (this one) and one engine process.

The API process holds the socket, the tokenizer and the registry; it never touches the GPU. An engine that dies, while
it starts or later, is started again (`supervisor.py`): its requests get a clear error, its jobs go on from their last
checkpoints.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web

from coserve import __version__
from coserve.api.answers import error_from_code
from coserve.api.app import STREAMS_TIMEOUT, make_app, make_runner
from coserve.api.http.connections import connection_limit, quiet_accept
from coserve.api.http.heap import freeze_heap
from coserve.api.service import Service
from coserve.config import Config, config_to_json
from coserve.errors import (
    EngineUnavailable,
    PortInUse,
    StartupError,
)
from coserve.link import EngineReady, EngineRefused, FromEngine, Link, Shutdown, ToEngine, api_end
from coserve.logs.format import log_event
from coserve.model.source import check_source
from coserve.model.tokenizer import Tokenizer
from coserve.processes import start_child
from coserve.state.failpoints import failpoint
from coserve.state.folder import DataFolder
from coserve.state.registry import Registry
from coserve.state.reserve import Reserve
from coserve.state.thread import RegistryThread
from coserve.supervisor import EngineDied, Supervisor

log = logging.getLogger(__name__)

T = TypeVar("T")

STOP_TIMEOUT = 60.0
"""Seconds that the engine has to save checkpoints."""


class EngineProcess:
    """An engine process that is ready, and the link to it."""

    def __init__(
        self, process: asyncio.subprocess.Process, link: Link[ToEngine, FromEngine], ready: EngineReady
    ) -> None:
        self.process, self.link, self.ready = process, link, ready

    @classmethod
    async def start(cls, config: Config) -> EngineProcess:
        """Start the process and wait until its base is loaded. Raises `EngineDied`, or the `StartupError` that it names."""
        began = time.monotonic()
        ours, theirs = socket.socketpair()
        async with contextlib.AsyncExitStack() as undo:
            with theirs:
                link = await api_end(ours)
                undo.push_async_callback(link.close)
                process = await start_child("coserve.worker", theirs, stdin=asyncio.subprocess.PIPE)
            undo.push_async_callback(_kill, process)
            log_event(log, "engine starts", engine_pid=process.pid, model=config.model)
            ready = await cls._hear(process, link, config)
            undo.pop_all()
        log_event(
            log,
            "engine ready",
            engine_pid=process.pid,
            model=ready.spec.name,
            family=ready.spec.family,
            device=ready.spec.device,
            dtype=ready.spec.dtype,
            kv_tokens=ready.kv_tokens,
            lora=ready.lora_way,
            seconds=round(time.monotonic() - began, 3),
            notes="; ".join(ready.notes) or None,
        )
        return cls(process, link, ready)

    @staticmethod
    async def _hear(
        process: asyncio.subprocess.Process, link: Link[ToEngine, FromEngine], config: Config
    ) -> EngineReady:
        assert process.stdin is not None
        process.stdin.write(config_to_json(config))
        process.stdin.close()
        try:
            message = await link.receive()
        except EngineUnavailable:
            raise EngineDied(await process.wait()) from None
        if isinstance(message, EngineRefused):
            await process.wait()
            error = error_from_code(message.code, message.message)
            raise error if isinstance(error, StartupError) else StartupError(message.message)
        assert isinstance(message, EngineReady), message
        return message

    async def wait(self) -> int:
        return await self.process.wait()

    async def stop(self) -> None:
        """Ask for a clean end (the engine saves checkpoints); kill what does not end in time."""
        if self.process.returncode is None:
            self.link.send(Shutdown())
            try:
                async with asyncio.timeout(STOP_TIMEOUT):
                    await self.process.wait()
            except TimeoutError:
                log.warning("the engine did not stop within %.0f s: killed", STOP_TIMEOUT)
                await _kill(self.process)
        await self.link.close()


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything expensive is started. Raises `PortInUse`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} on {host} is taken by another program") from None
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock


@asynccontextmanager
async def _serving(config: Config) -> AsyncIterator[tuple[int, Supervisor, asyncio.Task[None]]]:
    """Startup and shutdown around serving: yields the port, the engine's supervisor and the task that it runs in.

    HTTP is answered from here on: until the first engine is there, `/health` says `starting` and why it takes long.
    """
    config = dataclasses.replace(config, max_connections=connection_limit(config.max_connections))
    asyncio.get_running_loop().set_exception_handler(quiet_accept())
    folder = DataFolder(config.data_dir)
    async with contextlib.AsyncExitStack() as stack:
        sock = stack.enter_context(contextlib.closing(bind(config.host, config.port)))
        os.umask(0o077)  # what the daemon writes, and its processes, is for its user alone: corpora, adapters, logs
        stack.enter_context(folder.lock())
        folder.close_to_others()
        port = sock.getsockname()[1]
        log_event(
            log,
            "daemon starts",
            version=__version__,
            pid=os.getpid(),
            model=config.model,
            device=config.device,
            policy=config.policy,
            data_dir=str(config.data_dir),
            host=config.host,
            port=port,
        )
        tokenizer = await _unwaited(lambda: _load_tokenizer(config))
        registry = RegistryThread(lambda: Registry(folder.database), reserve=Reserve(folder.reserve))
        stack.push_async_callback(registry.close)
        service = Service(config, folder, registry, tokenizer)
        stack.push_async_callback(service.close)  # after the engine: its last words are heard and written down
        await service.open()
        supervisor = Supervisor(lambda: EngineProcess.start(config), service)
        supervising = asyncio.create_task(supervisor.run())
        stack.push_async_callback(_end, supervising)
        runner = make_runner(make_app(service, config), config)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        freeze_heap()
        await web.SockSite(runner, sock).start()
        yield port, supervisor, supervising


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, StartupError):
        await task


class _Signals:
    """SIGINT and SIGTERM: the first asks for an orderly stop, the second stops at once."""

    def __init__(self) -> None:
        self._came = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take, number)

    async def wait(self) -> None:
        """Until the first."""
        await self._came.wait()

    def _take(self, number: signal.Signals) -> None:
        if self._came.is_set():
            log.warning("stopped at once: what was not saved goes on from the last checkpoints")
            logging.shutdown()
            os._exit(128 + number)  # the engine process dies with this one
        self._came.set()
        log.info("stopping, at most %.0f s; a second signal stops at once", STREAMS_TIMEOUT + STOP_TIMEOUT)


async def serve(config: Config, *, ready: Callable[[int], None]) -> None:
    """Run until SIGINT or SIGTERM. `ready` is called with the port once requests are answered by an engine.

    Raises a `StartupError` leaf when the daemon cannot start, or when its engine cannot stay alive.
    """
    began, signals = time.monotonic(), _Signals()
    stopping = asyncio.create_task(signals.wait())
    async with contextlib.AsyncExitStack() as stack:
        opening = asyncio.create_task(stack.enter_async_context(_serving(config)))
        await asyncio.wait({stopping, opening}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            port, supervisor, supervising = opening.result()
            attached = asyncio.create_task(supervisor.attached.wait())
            await asyncio.wait({stopping, supervising, attached}, return_when=asyncio.FIRST_COMPLETED)
            if attached.done():
                log_event(log, "daemon ready", host=config.host, port=port, seconds=round(time.monotonic() - began, 3))
                ready(port)
                await asyncio.wait({stopping, supervising}, return_when=asyncio.FIRST_COMPLETED)
            attached.cancel()
            if supervising.done():
                supervising.result()
        else:
            opening.cancel()
            await asyncio.wait({opening})
        stopping.cancel()
        ended = time.monotonic()
    log_event(log, "daemon stopped", seconds=round(time.monotonic() - ended, 3))


async def _unwaited(work: Callable[[], T]) -> T:
    """The result of `work`, run in a thread that the end of the process does not wait for: it may download for minutes."""
    found: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001  # the waiting end raises it
            found.set_exception(error)

    threading.Thread(target=run, name="startup", daemon=True).start()
    return await asyncio.wrap_future(found)


def _load_tokenizer(config: Config) -> Tokenizer:
    failpoint("daemon.start")
    check_source(config.model, weights=config.load_format == "auto")
    return Tokenizer.load(config.model)
