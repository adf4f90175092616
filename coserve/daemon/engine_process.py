"""Starts and stops the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time

from coserve.config import Config, config_to_json
from coserve.daemon.supervisor import EngineDied
from coserve.errors import (
    EngineUnavailable,
    error_from_code,
)
from coserve.link import EngineReady, EngineRefused, FromEngine, Link, Shutdown, ToEngine
from coserve.logs.format import log_event
from coserve.processes import start_child
from coserve.stream_link import api_end

log = logging.getLogger(__name__)

STOP_TIMEOUT = 60.0
"""Seconds that the engine has to save checkpoints."""


class EngineProcess:
    """A ready engine process and the link to it."""

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
                process = await start_child("coserve.engine.process", theirs, stdin=asyncio.subprocess.PIPE)
            undo.push_async_callback(kill, process)
            log_event(log, "engine starts", engine_pid=process.pid, model=config.model)
            ready = await cls._receive_ready(process, link, config)
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
    async def _receive_ready(
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
            raise error_from_code(message.code, message.message)  # a `StartupError`
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
                await kill(self.process)
        await self.link.close()


async def kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
