"""Notifies tasks that wait for changes of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class JobWatchers:
    """Events by job id, set after a change of the job was committed."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = {}
        self._subscribers: list[Callable[[str], None]] = []

    def subscribe(self, notify: Callable[[str], None]) -> None:
        """Call `notify` after each change of any job, with its id. It must return at once."""
        self._subscribers.append(notify)

    @contextmanager
    def watch(self, job: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each change of the job; the caller clears it."""
        event = asyncio.Event()
        self._events.setdefault(job, set()).add(event)
        try:
            yield event
        finally:
            watchers = self._events[job]
            watchers.discard(event)
            if not watchers:
                del self._events[job]

    def notify(self, job: str) -> None:
        for notify in self._subscribers:
            notify(job)
        for event in self._events.get(job, ()):
            event.set()

    def notify_all(self) -> None:
        for job in self._events:
            self.notify(job)
