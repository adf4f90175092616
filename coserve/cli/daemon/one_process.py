"""The process of an engine without tensor parallelism. It has the interface of a `RankGroup`."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

from coserve.config import Config, config_to_json
from coserve.core.errors import CoserveError
from coserve.core.processes import is_stopped, signal_child, start_child
from coserve.core.ranks import HEARTBEAT, SILENCE

log = logging.getLogger(__name__)


class OneProcess:
    """Starts, watches and ends one engine process. If the process is stopped for `SILENCE` seconds, as by SIGSTOP, it
    is killed and the supervisor starts another."""

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
