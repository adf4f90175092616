"""SIGINT and SIGTERM: the first asks for an orderly stop, the second stops at once."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from coserve.api.http.limits import STREAMS_TIMEOUT
from coserve.cli.daemon.engine_process import STOP_TIMEOUT

log = logging.getLogger(__name__)


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
