"""Tracks the adapter versions that running requests use. Use only on the event loop's thread."""

from __future__ import annotations

import asyncio
from collections import Counter

from coserve.core.types import AdapterRef


class AdaptersInUse:
    def __init__(self) -> None:
        self._counts: Counter[AdapterRef] = Counter()
        self._unused: dict[AdapterRef, asyncio.Event] = {}
        """Events of `unused`, each set when its version's last request ends."""

    def add(self, ref: AdapterRef) -> None:
        """Count one more request that uses the version."""
        self._counts[ref] += 1

    def remove(self, ref: AdapterRef) -> None:
        self._counts[ref] -= 1
        if not self._counts[ref]:
            del self._counts[ref]
            if (event := self._unused.pop(ref, None)) is not None:
                event.set()

    def __contains__(self, ref: AdapterRef) -> bool:
        return ref in self._counts

    async def unused(self, ref: AdapterRef) -> None:
        """Wait until no request uses the version."""
        if ref in self:
            await self._unused.setdefault(ref, asyncio.Event()).wait()
