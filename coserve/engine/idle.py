"""Idle behaviour of the engine: collect garbage, then sleep."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from coserve.core.garbage import IDLE, GarbageCollection
from coserve.engine.stalls import SLEEP, Stalls


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
