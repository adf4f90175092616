"""Limits concurrent reads of adapters; those that requests wait for go first."""

from __future__ import annotations

import asyncio

from coserve.lora.store.entry import Entry


class ReadTurns:
    """At most `most` reads at a time. Reads that a request awaits go before prefetches."""

    def __init__(self, most: int) -> None:
        self._free, self._waiting = most, dict[Entry, asyncio.Future[None]]()

    def __len__(self) -> int:
        """Reads that wait for a turn."""
        return len(self._waiting)

    async def take(self, entry: Entry) -> None:
        """Wait for a turn to read this entry's files; `give_back` ends it."""
        if self._free:
            self._free -= 1
            return
        self._waiting[entry] = turn = asyncio.get_running_loop().create_future()
        await turn

    def give_back(self) -> None:
        awaited = (entry for entry in self._waiting if entry.waiting)
        entry = next(awaited, next(iter(self._waiting), None))
        if entry is None:
            self._free += 1
        elif not (turn := self._waiting.pop(entry)).done():  # else the store was closed
            turn.set_result(None)
