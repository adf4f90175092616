"""Handles the messages of the API process as they come, a few milliseconds' worth between two chances to serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from coserve.engine.stalls import Stalls
from coserve.errors import EngineUnavailable
from coserve.link import FromEngine, Link, ToEngine

log = logging.getLogger(__name__)

MESSAGES_AT_ONCE = 0.005
"""Seconds of work on messages after which the engine has a chance to serve before it handles more."""


class Inbox:
    """`handle` is called with each message, then `changed` is set. `clock` gives seconds."""

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
        """Spent since the last chance to serve."""
        self._chance = asyncio.Event()

    def chance(self) -> None:
        """The engine can serve now, and handle messages again afterwards."""
        self._seconds = 0.0
        self._chance.set()

    async def run(self) -> None:
        """Until the API process is gone. Raises what `handle` raises."""
        while True:
            try:
                message = await self._link.receive()
            except EngineUnavailable:
                log.info("the API process is gone")
                return
            began = self._clock()
            with self._stalls.during("messages"):
                self._handle(message)
            self._changed.set()
            self._seconds += self._clock() - began
            if self._seconds >= MESSAGES_AT_ONCE:
                self._chance.clear()
                await self._chance.wait()
