"""The daemon: startup, serving, shutdown. It has one API process (this one) and one engine process.

The API process holds the socket, the tokenizer and the registry; it never touches the GPU. An engine that dies, at its
start or later, is started again (`cli/daemon/supervisor.py`): its requests get a clear error, its jobs continue from
their last checkpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from coserve import __version__
from coserve.api.engine_client import EngineClient
from coserve.api.http.limits import STREAMS_TIMEOUT, WAITING_CONNECTIONS, connection_limit
from coserve.api.tracking.libraries import check_trackers
from coserve.cli.daemon.engine_process import STOP_TIMEOUT, EngineStarts
from coserve.cli.daemon.supervisor import Supervisor
from coserve.cli.status_lines import address
from coserve.config import Config
from coserve.core.errors import PortInUse, StartupError
from coserve.core.health import EngineStatus, Warming
from coserve.core.logs import log_event
from coserve.data.pretrained.source import check_source
from coserve.state.folder import DataFolder
from coserve.state.running import RunningDaemon, announced, running

if TYPE_CHECKING:
    from coserve.api.service import Service

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket, opened before anything expensive starts. Raises `PortInUse`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(WAITING_CONNECTIONS)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            own = [daemon for daemon in running() if urlsplit(daemon.url).port == port]
            by = f"coserve, pid {own[0].pid} (coserve ps)" if own else "another program"
            raise PortInUse(f"port {port} on {host} is taken by {by}") from None
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock


@dataclasses.dataclass(frozen=True)
class _Serving:
    """A daemon that listens on `port`. `supervising`: the task that runs `supervisor`."""

    port: int
    service: Service
    engine: EngineClient
    supervisor: Supervisor
    supervising: asyncio.Task[None]


@asynccontextmanager
async def _serving(config: Config) -> AsyncIterator[_Serving]:
    """Start the daemon, and shut it down at the end of the block.

    HTTP is answered inside the block: until the first engine is ready, `/health` says `starting` and its progress.
    """
    config = dataclasses.replace(config, max_connections=connection_limit(config.max_connections))
    folder = DataFolder(config.data_dir)
    check_source(config.model, weights=config.load_format == "auto")
    check_trackers(config.tracker)
    async with contextlib.AsyncExitStack() as stack:
        sock = stack.enter_context(contextlib.closing(bind(config.host, config.port)))
        os.umask(0o077)  # files of all processes are private to their user: corpora, adapters, logs
        stack.enter_context(folder.lock())
        folder.restrict_access()
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
        url = address(config.host, port, tls=config.tls_cert is not None)
        running = RunningDaemon(
            pid=os.getpid(), url=url, model=config.model, data_dir=str(folder.root), started_at=time.time()
        )
        stack.enter_context(announced(running))
        engine = EngineClient()
        engines = EngineStarts(config, engine.starting)
        stack.push_async_callback(engines.close)
        await engines.begin()
        from coserve.cli.daemon.http import open_service, serve_http  # takes a second; the engine starts meanwhile

        service = await open_service(config, folder, engine, stack)
        supervisor = Supervisor(engines.start, service)
        supervising = asyncio.create_task(supervisor.run())
        stack.push_async_callback(_end, supervising)
        await serve_http(service, config, sock, stack)
        yield _Serving(port, service, engine, supervisor, supervising)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, StartupError):
        await task


async def serve(config: Config, *, report: Callable[[int, EngineStatus, Warming | None], None]) -> None:
    """Run until SIGINT or SIGTERM. `report` gets the port, the status and the progress of the warm-up at each change.

    Raises a subclass of `StartupError` when the daemon cannot start, or when its engine dies repeatedly.
    """
    began, signals = time.monotonic(), StopSignals(config.drain_seconds)
    stopping = asyncio.create_task(signals.wait())
    async with contextlib.AsyncExitStack() as stack:
        opening = asyncio.create_task(stack.enter_async_context(_serving(config)))
        await asyncio.wait({stopping, opening}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            running = opening.result()
            port, engine, supervising = running.port, running.engine, running.supervising

            def report_status() -> None:
                report(port, engine.status, engine.warming)

            with engine.watched(report_status):
                report_status()
                attached = asyncio.create_task(running.supervisor.attached.wait())
                await asyncio.wait({stopping, supervising, attached}, return_when=asyncio.FIRST_COMPLETED)
                if attached.done():
                    seconds = round(time.monotonic() - began, 3)
                    log_event(log, "daemon ready", host=config.host, port=port, seconds=seconds)
                    await asyncio.wait({stopping, supervising}, return_when=asyncio.FIRST_COMPLETED)
                attached.cancel()
            if stopping.done() and not supervising.done():
                draining = asyncio.create_task(running.service.drain(signals.drain))
                await asyncio.wait({draining, supervising}, return_when=asyncio.FIRST_COMPLETED)
                draining.cancel()
            if supervising.done():
                supervising.result()
        else:
            opening.cancel()
            await asyncio.wait({opening})
        stopping.cancel()
        ended = time.monotonic()
    log_event(log, "daemon stopped", seconds=round(time.monotonic() - ended, 3))


class StopSignals:
    """Handles SIGINT and SIGTERM: the first asks for an orderly stop, the second stops at once. `drain`: seconds that
    requests in flight may take after a SIGTERM, which service managers send. After Ctrl-C they get none: a user waits
    for it."""

    def __init__(self, drain: float) -> None:
        self._drain = drain
        self.drain = 0.0
        """Seconds that requests in flight may take after the signal that came."""
        self._came = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take, number)

    async def wait(self) -> None:
        """Wait for the first signal."""
        await self._came.wait()

    def _take(self, number: signal.Signals) -> None:
        if self._came.is_set():
            log.warning("stopped at once: what was not saved goes on from the last checkpoints")
            logging.shutdown()
            os._exit(128 + number)  # the engine process dies with this one
        self._came.set()
        self.drain = self._drain if number == signal.SIGTERM else 0.0
        most = self.drain + STREAMS_TIMEOUT + STOP_TIMEOUT
        log.info("stopping, at most %.0f s; a second signal stops at once", most)
