"""Collects the API process's garbage while no request is in progress."""

from __future__ import annotations

import asyncio

from aiohttp import web

from coserve.api.http.security import Handler
from coserve.core.garbage import IDLE, GarbageCollection


class IdleCollection:
    """Runs a full garbage collection, which blocks the event loop, once no request was in progress for `IDLE`
    seconds."""

    def __init__(self, garbage: GarbageCollection) -> None:
        self._garbage = garbage
        self._requests = 0
        self._timer: asyncio.TimerHandle | None = None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._requests += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            return await handler(request)
        finally:
            self._requests -= 1
            self._garbage.while_busy()
            if not self._requests and self._garbage.full_due:
                self._timer = asyncio.get_running_loop().call_later(IDLE, self._garbage.collect_all)
