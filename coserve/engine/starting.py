"""An engine that starts hears its end: it may wait for kernels for minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from coserve.errors import EngineUnavailable
from coserve.link import FromEngine, Link, Shutdown, ToEngine

T = TypeVar("T")


class EndedAtStart(Exception):
    """The engine was asked to end while it started, or the API process is gone."""


async def until_shutdown(start: Coroutine[Any, Any, T], link: Link[FromEngine, ToEngine]) -> T:
    """The result of `start`, which is cancelled when `Shutdown` comes. The API process sends nothing else before `EngineReady`.

    Raises `EndedAtStart`, and what `start` raises.
    """
    starting, receiving = asyncio.create_task(start), asyncio.create_task(link.receive())
    try:
        await asyncio.wait({starting, receiving}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
        with suppress(EngineUnavailable):
            message = receiving.result()
            assert isinstance(message, Shutdown), f"expected no message before the engine is ready, got {message}"
        raise EndedAtStart
    finally:
        tasks = (starting, receiving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
