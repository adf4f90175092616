"""The daemon: startup, serve, shutdown. One API process (this one) and one engine process.

The API process holds the socket, the tokenizer and the registry; it never touches the GPU. An engine that dies is
started again: its requests get a clear error, its jobs go on from their last checkpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from coserve.api.app import make_app, make_runner
from coserve.api.service import Service
from coserve.config import Config, child_environment, config_to_json
from coserve.errors import (
    EngineUnavailable,
    PortInUse,
    StartupError,
    UnsupportedBase,
)
from coserve.link import EngineReady, EngineRefused, FromEngine, Link, Shutdown, ToEngine, api_end
from coserve.model.tokenizer import Tokenizer
from coserve.state.folder import DataFolder
from coserve.state.registry import Registry
from coserve.state.thread import RegistryThread

log = logging.getLogger(__name__)

STOP_TIMEOUT = 60.0
QUICK_DEATH = 10.0
MAX_QUICK_DEATHS = 5


class EngineProcess:
    """The engine process of this moment and the link to it."""

    def __init__(
        self, process: asyncio.subprocess.Process, link: Link[ToEngine, FromEngine], ready: EngineReady
    ) -> None:
        self.process, self.link, self.ready = process, link, ready

    @classmethod
    async def start(cls, config: Config) -> EngineProcess:
        """Start the process and wait until its base is loaded. Raises the `StartupError` that it names."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "coserve.worker",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=child_environment(),
            )
        assert process.stdin is not None
        process.stdin.write(config_to_json(config))
        process.stdin.close()
        link = await api_end(ours)
        try:
            message = await link.receive()
        except EngineUnavailable:
            raise StartupError(
                f"the engine process ended with status {await process.wait()} while it started"
            ) from None
        if isinstance(message, EngineRefused):
            await process.wait()
            raise UnsupportedBase(message.message)
        assert isinstance(message, EngineReady), message
        return cls(process, link, message)

    async def stop(self) -> None:
        """Ask for a clean end (the engine saves checkpoints); kill what does not end in time."""
        if self.process.returncode is None:
            self.link.send(Shutdown())
            try:
                async with asyncio.timeout(STOP_TIMEOUT):
                    await self.process.wait()
            except TimeoutError:
                log.warning("the engine did not stop within %.0f s: killed", STOP_TIMEOUT)
                self.process.kill()
                await self.process.wait()
        await self.link.close()


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


async def _supervise(service: Service, engine: EngineProcess, config: Config) -> None:
    """Keep one engine alive until cancelled; stop it then. Gives up when it dies at once again and again."""
    quick_deaths = 0
    try:
        while True:
            born = time.monotonic()
            status = await engine.process.wait()
            log.error("the engine process ended with status %s; starting it again", status)
            await engine.link.close()
            service.engine_lost()
            quick_deaths = quick_deaths + 1 if time.monotonic() - born < QUICK_DEATH else 0
            if quick_deaths >= MAX_QUICK_DEATHS:
                raise StartupError(f"the engine died {quick_deaths} times within {QUICK_DEATH:.0f} s of its start")
            engine = await EngineProcess.start(config)
            await service.attach(engine.link, engine.ready)
    finally:
        await engine.stop()


@asynccontextmanager
async def _serving(config: Config) -> AsyncIterator[tuple[int, asyncio.Task[None]]]:
    """Startup and shutdown around serving: yields the port and the task that supervises the engine."""
    folder = DataFolder(config.data_dir)
    async with contextlib.AsyncExitStack() as stack:
        sock = stack.enter_context(contextlib.closing(bind(config.host, config.port)))
        stack.enter_context(folder.lock())
        registry = RegistryThread(lambda: Registry(folder.database))
        stack.push_async_callback(registry.close)
        tokenizer = Tokenizer.load(config.model)
        engine = await EngineProcess.start(config)
        service = Service(config, folder, registry, tokenizer)
        await service.attach(engine.link, engine.ready)
        stack.push_async_callback(service.close)  # after the engine: its last words are heard and written down
        supervisor = asyncio.create_task(_supervise(service, engine, config))
        stack.push_async_callback(_end, supervisor)
        runner = make_runner(make_app(service, config), config)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, sock).start()
        yield sock.getsockname()[1], supervisor


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, StartupError):
        await task


async def serve(config: Config, *, ready: Callable[[int], None]) -> None:
    """Run until SIGINT or SIGTERM. `ready` is called with the port once requests are answered.

    Raises a `StartupError` leaf when the daemon cannot start, or when its engine cannot stay alive.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with _serving(config) as (port, supervisor):
        ready(port)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({stopping, supervisor}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if supervisor.done():
            supervisor.result()
