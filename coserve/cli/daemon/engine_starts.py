"""Starts engines. The first start is early: the engine imports torch while the API process imports its own modules and
opens the registry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from coserve.cli.daemon.engine_process import EngineDied, EngineProcess
from coserve.config import Config
from coserve.core.errors import StartupError
from coserve.core.link.engine import EngineWarming


class EngineStarts:
    """Starts engines for the supervisor. Call `close` at the end, also after an error."""

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
