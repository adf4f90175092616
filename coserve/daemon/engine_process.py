"""Starts and stops the engine: one process, or one for each rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable

from coserve.config import Config, config_to_json
from coserve.daemon.rank_group import RankGroup
from coserve.daemon.supervisor import EngineDied
from coserve.errors import (
    EngineUnavailable,
    error_from_code,
)
from coserve.link import EngineReady, EngineRefused, EngineWarming, FromEngine, Link, Shutdown, ToEngine
from coserve.logs.format import log_event
from coserve.processes import signal_child, start_child
from coserve.stream_link import api_end

log = logging.getLogger(__name__)

STOP_TIMEOUT = 60.0
"""Seconds that the engine has to save checkpoints."""


class EngineProcess:
    """A ready engine and the link to it. `group`: all of its processes, where there are several; `process` is the first then."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        link: Link[ToEngine, FromEngine],
        ready: EngineReady,
        group: RankGroup | None = None,
    ) -> None:
        self.process, self.link, self.ready, self.ranks = process, link, ready, group

    @classmethod
    async def start(
        cls,
        config: Config,
        report: Callable[[EngineWarming], None] = lambda _: None,
        spawned: Callable[[], None] = lambda: None,
    ) -> EngineProcess:
        """Start the engine and wait until it is ready; `report` gets the progress of the warm-up that it waits for. `spawned` is called
        once its processes run and have their settings.

        Raises `EngineDied`, or the `StartupError` that it names."""
        began = time.monotonic()
        ours, theirs = socket.socketpair()
        group = RankGroup() if config.tp > 1 else None
        async with contextlib.AsyncExitStack() as undo:
            with theirs:
                link = await api_end(ours)
                undo.push_async_callback(link.close)
                if group is None:
                    process = await start_child("coserve.engine.process", theirs, stdin=asyncio.subprocess.PIPE)
                    undo.push_async_callback(kill, process)
                    assert process.stdin is not None
                    process.stdin.write(config_to_json(config))
                    process.stdin.close()
                else:
                    undo.push_async_callback(group.kill)
                    await group.start(config, theirs)
                    process = group.leader
            log_event(log, "engine starts", engine_pid=process.pid, model=config.model)
            spawned()
            ready = await _receive_ready(process, link, group, report)
            undo.pop_all()
        log_event(
            log,
            "engine ready",
            engine_pid=process.pid,
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
        return cls(process, link, ready, group)

    async def wait(self) -> int:
        return await (self.process if self.ranks is None else self.ranks).wait()

    async def stop(self) -> None:
        """Ask for a clean end (the engine saves checkpoints); kill what does not end in time."""
        if self.ranks is not None:
            self.ranks.stop()
        if self.process.returncode is None:
            self.link.send(Shutdown())
            try:
                async with asyncio.timeout(STOP_TIMEOUT):
                    await self.wait()
            except TimeoutError:
                log.warning("the engine did not stop within %.0f s: killed", STOP_TIMEOUT)
                await kill(self.process)
        if self.ranks is not None:
            await self.ranks.kill()
        await self.link.close()


async def _receive_ready(
    process: asyncio.subprocess.Process,
    link: Link[ToEngine, FromEngine],
    group: RankGroup | None,
    report: Callable[[EngineWarming], None],
) -> EngineReady:
    receiving = asyncio.create_task(_receive_end_of_start(link, report))
    lost = None if group is None else asyncio.create_task(group.lost.wait())
    try:
        await asyncio.wait({receiving, *(() if lost is None else (lost,))}, return_when=asyncio.FIRST_COMPLETED)
        message = None if group is not None and group.loss is not None else await receiving
    except EngineUnavailable:
        message = None
    finally:
        receiving.cancel()
        if lost is not None:
            lost.cancel()
    if message is None:
        status = await process.wait()
        if group is not None and group.refusal is not None:
            raise group.refusal
        raise EngineDied(status, None if group is None else group.loss)
    if isinstance(message, EngineRefused):
        if group is None:
            await process.wait()
        raise error_from_code(message.code, message.message)  # a `StartupError`
    assert isinstance(message, EngineReady), message
    return message


async def _receive_end_of_start(
    link: Link[ToEngine, FromEngine], report: Callable[[EngineWarming], None]
) -> FromEngine:
    """The first message that is no progress."""
    while isinstance(message := await link.receive(), EngineWarming):
        report(message)
    return message


async def kill(process: asyncio.subprocess.Process) -> None:
    signal_child(process, signal.SIGKILL)
    await process.wait()
