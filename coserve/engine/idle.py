"""What the engine does when it has nothing to do: it collects garbage, and sleeps."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from coserve.engine.stalls import SLEEP, Stalls
from coserve.garbage import IDLE, GarbageCollection


class Idle:
    """`changed` is set by whatever gives the engine something to do."""

    def __init__(self, changed: asyncio.Event, garbage: GarbageCollection, stalls: Stalls) -> None:
        self._changed, self._garbage, self._stalls = changed, garbage, stalls

    async def sleep(self, seconds: float | None) -> None:
        """Until something changes, or `seconds` have passed (None: until something changes)."""
        if seconds is not None and seconds <= 0:
            await asyncio.sleep(0)
            return
        with self._stalls.during("gc"):
            self._garbage.idle()
        with self._stalls.during(SLEEP):
            if seconds is None and self._garbage.due:
                if await self._changes_within(IDLE):
                    return
                with self._stalls.during("gc"):
                    self._garbage.full()
            await self._changes_within(seconds)

    async def _changes_within(self, seconds: float | None) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._changed.wait()
        return False
