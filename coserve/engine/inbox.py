"""Handles messages of the API process as they arrive, for at most a few milliseconds between two generation steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from coserve.core.link.link import FromEngine, Link, PeerLost, ToEngine
from coserve.engine.stalls import Stalls

log = logging.getLogger(__name__)

MESSAGES_AT_ONCE = 0.005
"""Seconds of work on messages before the engine may begin a generation step."""


class Inbox:
    """Passes each message to `handle`, then sets `changed`. `clock` returns seconds."""

    def __init__(
        self,
        link: Link[FromEngine, ToEngine],
        handle: Callable[[ToEngine], None],
        changed: asyncio.Event,
        stalls: Stalls,
        clock: Callable[[], float],
    ) -> None:
        self._link, self._handle, self._changed, self._stalls, self._clock = link, handle, changed, stalls, clock
        self._seconds = 0.0
        """Seconds spent on messages since a step could last begin."""
        self._resumed = asyncio.Event()

    def step_can_begin(self) -> None:
        """Signal that the engine can begin a step now; message handling then resumes."""
        self._seconds = 0.0
        self._resumed.set()

    async def run(self) -> None:
        """Handle messages until the API process is gone. Raises what `handle` raises."""
        while True:
            try:
                message = await self._link.receive()
            except PeerLost:
                log.info("the API process is gone")
                return
            began = self._clock()
            with self._stalls.during("messages"):
                self._handle(message)
            self._changed.set()
            self._seconds += self._clock() - began
            if self._seconds >= MESSAGES_AT_ONCE:
                self._resumed.clear()
                await self._resumed.wait()
