"""Starts and stops the engine: one process, or one per tensor-parallel rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable

from coserve.cli.daemon.rank_group import RankGroup
from coserve.config import Config, config_to_json
from coserve.core.errors import CoserveError, StartupError, error_from_code
from coserve.core.link.channel import api_end
from coserve.core.link.engine import EngineReady, EngineRefused, EngineWarming, Shutdown
from coserve.core.link.link import FromEngine, Link, PeerLost, ToEngine
from coserve.core.logs import log_event
from coserve.core.processes import is_stopped, signal_child, start_child
from coserve.core.ranks import HEARTBEAT, SILENCE

log = logging.getLogger(__name__)

STOP_TIMEOUT = 60.0
"""Seconds that the engine has to save checkpoints when it is stopped."""


class OneProcess:
    """Starts, watches and ends the process of an engine without tensor parallelism, with the interface of a
    `RankGroup`. If the process is stopped for `SILENCE` seconds, as by SIGSTOP, it is killed and the supervisor starts
    another."""

    refusal: CoserveError | None = None
    """Always None: this process reports on its link why it cannot start."""

    def __init__(self) -> None:
        self.loss: str | None = None
        """Set if it was killed because it was stopped; else None."""
        self.lost = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, config: Config, link: socket.socket) -> None:
        """Start the process. `link`: the engine's end of the link to the API process. After an error, call `kill`."""
        self._process = await start_child("coserve.engine.process", link, stdin=config_to_json(config))
        self._watching = asyncio.create_task(self._watch(self._process))

    @property
    def leader(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "it was not started"
        return self._process

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit status."""
        return await self.leader.wait()

    def stop(self) -> None:
        """Do nothing: the process may end at any time."""

    async def kill(self) -> None:
        """Kill the process if it still runs, and wait for it."""
        if self._process is not None and self._watching is not None:
            self._watching.cancel()
            signal_child(self._process, signal.SIGKILL)
            await self._process.wait()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        looks = 0  # counted instead of seconds: if the daemon itself was stopped too, the engine may go on
        while looks * HEARTBEAT < SILENCE:
            await asyncio.sleep(HEARTBEAT)
            looks = looks + 1 if is_stopped(process.pid) else 0
        self.loss = f"its process did not run for {SILENCE:.0f} s, as after SIGSTOP"
        log.error("%s: it is ended", self.loss)
        self.lost.set()
        signal_child(process, signal.SIGKILL)


class EngineDied(Exception):
    """The engine process exited with this status before it was ready. `loss`: see `EngineRanks`."""

    def __init__(self, status: int, loss: str | None = None) -> None:
        super().__init__(status)
        self.status, self.loss = status, loss


class EngineProcess:
    """A ready engine and the link to it."""

    def __init__(self, processes: OneProcess | RankGroup, link: Link[ToEngine, FromEngine], ready: EngineReady) -> None:
        self.link, self.ready, self._processes = link, ready, processes
        self._hung: str | None = None

    @classmethod
    async def start(
        cls,
        config: Config,
        report: Callable[[EngineWarming], None] = lambda _: None,
        spawned: Callable[[], None] = lambda: None,
    ) -> EngineProcess:
        """Start the engine and wait until it is ready. `report` gets the progress of its warm-up. `spawned` is called
        once its processes run and have their settings.

        Raises `EngineDied`, or the `StartupError` that the engine names.
        """
        began = time.monotonic()
        ours, theirs = socket.socketpair()
        processes = RankGroup() if config.tp > 1 else OneProcess()
        async with contextlib.AsyncExitStack() as undo:
            with theirs:
                link = await api_end(ours)
                undo.push_async_callback(link.close)
                undo.push_async_callback(processes.kill)
                await processes.start(config, theirs)
            log_event(log, "engine starts", engine_pid=processes.leader.pid, model=config.model)
            spawned()
            ready = await _receive_ready(processes, link, report)
            undo.pop_all()
        log_event(
            log,
            "engine ready",
            engine_pid=processes.leader.pid,
            model=ready.spec.name,
            family=ready.spec.family,
            device=ready.spec.device,
            dtype=ready.spec.dtype,
            policy=config.resolved(device=ready.spec.device).policy,
            kv_tokens=ready.kv_tokens,
            lora=ready.lora_backend,
            seconds=round(time.monotonic() - began, 3),
            notes="; ".join(ready.notes) or None,
        )
        return cls(processes, link, ready)

    @property
    def process(self) -> asyncio.subprocess.Process:
        """The engine's process; with several, that of rank 0, which has the link."""
        return self._processes.leader

    @property
    def ranks(self) -> RankGroup | None:
        """The engine's processes if there are several."""
        return self._processes if isinstance(self._processes, RankGroup) else None

    @property
    def loss(self) -> str | None:
        """Why the engine was killed, if it hung or lost a process."""
        return self._hung or self._processes.loss

    async def wait(self) -> int:
        return await self._processes.wait()

    def end(self, loss: str) -> None:
        """Kill the engine because it hangs."""
        self._hung = loss
        signal_child(self.process, signal.SIGKILL)  # other ranks end with it

    async def stop(self) -> None:
        """Ask the engine to stop cleanly (it saves checkpoints); kill it after a timeout."""
        self._processes.stop()
        if self.process.returncode is None:
            self.link.send(Shutdown())
            try:
                async with asyncio.timeout(STOP_TIMEOUT):
                    await self.wait()
            except TimeoutError:
                log.warning("the engine did not stop within %.0f s: killed", STOP_TIMEOUT)
        await self._processes.kill()
        await self.link.close()


async def _receive_ready(
    processes: OneProcess | RankGroup, link: Link[ToEngine, FromEngine], report: Callable[[EngineWarming], None]
) -> EngineReady:
    receiving = asyncio.create_task(_receive_end_of_start(link, report))
    lost = asyncio.create_task(processes.lost.wait())
    try:
        await asyncio.wait({receiving, lost}, return_when=asyncio.FIRST_COMPLETED)
        message = None if processes.loss is not None else await receiving
    except PeerLost:
        message = None
    finally:
        receiving.cancel()
        lost.cancel()
    if message is None:
        status = await processes.leader.wait()
        if processes.refusal is not None:
            raise processes.refusal
        raise EngineDied(status, processes.loss)
    if isinstance(message, EngineRefused):
        if isinstance(processes, OneProcess):
            await processes.wait()
        raise error_from_code(message.code, message.message)  # a `StartupError`
    assert isinstance(message, EngineReady), message
    return message


async def _receive_end_of_start(
    link: Link[ToEngine, FromEngine], report: Callable[[EngineWarming], None]
) -> FromEngine:
    """Return the first message that is not progress."""
    while isinstance(message := await link.receive(), EngineWarming):
        report(message)
    return message


class EngineStarts:
    """Starts engines for the supervisor; the first one early: it imports torch while the API process imports its own
    modules and opens the registry. Call `close` at the end, also after an error."""

    def __init__(self, config: Config, report: Callable[[EngineWarming], None]) -> None:
        self._config, self._report = config, report
        self._first: asyncio.Task[EngineProcess] | None = None

    async def begin(self) -> None:
        """Start the first engine. Return once its process runs. Later errors are raised by `start`.

        Call it under the data folder's lock. It may run before recovery: a single engine touches nothing there that
        recovery does, and has no jobs yet. Several ranks use the staging folder, which recovery empties, so they are
        not started here.
        """
        if self._config.tp > 1:
            return
        spawned = asyncio.Event()
        self._first = asyncio.create_task(EngineProcess.start(self._config, self._report, spawned.set))
        waiting = asyncio.create_task(spawned.wait())
        try:
            await asyncio.wait({self._first, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    async def start(self) -> EngineProcess:
        """Return a ready engine: the first one, or a new one. Raises as `EngineProcess.start`."""
        first, self._first = self._first, None
        return await (EngineProcess.start(self._config, self._report) if first is None else first)

    async def close(self) -> None:
        """End the first engine if `start` has not returned it."""
        if self._first is None:
            return
        self._first.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineDied, StartupError):
            await (await self._first).stop()
