"""The API process collects all garbage when no request was in progress for a while. In virtual time."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from coserve.api.http.idle_collection import IdleCollection
from coserve.core.garbage import IDLE, YOUNG_WHEN_IDLE, GarbageCollection
from tests.support.interpreter import Interpreter
from tests.support.virtual_clock import run_virtual


def test_it_waits_for_a_pause_between_requests() -> None:
    async def main() -> None:
        interpreter = Interpreter()
        middleware = IdleCollection(GarbageCollection(interpreter.collect, interpreter.count)).middleware()

        async def answer(seconds: float) -> None:
            async def handler(request: web.Request) -> web.StreamResponse:
                interpreter.counts[0] += YOUNG_WHEN_IDLE
                await asyncio.sleep(seconds)
                return web.Response()

            await middleware(make_mocked_request("GET", "/"), handler)

        stream = asyncio.create_task(answer(20 * IDLE))
        for _ in range(20):
            await answer(IDLE / 2)
            await asyncio.sleep(IDLE / 2)
            assert 2 not in interpreter.collected, "a stream is in progress, or a request has just ended"
        await stream
        await asyncio.sleep(2 * IDLE)
        assert interpreter.collected.count(2) == 1
        await asyncio.sleep(100 * IDLE)
        assert interpreter.collected.count(2) == 1

    run_virtual(main())
