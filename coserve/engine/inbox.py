"""Handles messages of the API process as they arrive, for at most a few milliseconds between two generation steps; and
the sleep of an engine that has no work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from coserve.core.garbage import IDLE, GarbageCollection
from coserve.core.link.link import FromEngine, Link, PeerLost, ToEngine
from coserve.engine.stalls import SLEEP, Stalls

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


class Idle:
    """Sleeps while there is no work. `changed` is set by each event that the engine must react to."""

    def __init__(self, changed: asyncio.Event, garbage: GarbageCollection, stalls: Stalls) -> None:
        self._changed, self._garbage, self._stalls = changed, garbage, stalls

    async def sleep(self, seconds: float | None) -> None:
        """Sleep until `changed` is set, or until `seconds` have passed."""
        if seconds is not None and seconds <= 0:
            await asyncio.sleep(0)
            return
        with self._stalls.during("gc"):
            self._garbage.when_idle()
        with self._stalls.during(SLEEP):
            if seconds is None and self._garbage.full_due:
                if await self._changes_within(IDLE):
                    return
                with self._stalls.during("gc"):
                    self._garbage.collect_all()
            await self._changes_within(seconds)

    async def _changes_within(self, seconds: float | None) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._changed.wait()
        return False
