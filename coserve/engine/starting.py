"""Start of an engine: sends progress reports, follows the warm-up process, and reacts to a shutdown meanwhile, as
kernels may take minutes to compile."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from coserve.core.cancellation import cancel_all
from coserve.core.link.channel import AsyncChannel
from coserve.core.link.engine import EngineWarming, Shutdown
from coserve.core.link.link import FromEngine, Link, PeerLost, ToEngine
from coserve.engine.warmup.parts import Progress, WarmUpTask

COMPILES = "compiling kernels"
WAITS = "waiting for another daemon, which compiles into the same cache folder"
DIED = "warm-up: its process died; what is missing is compiled in the engine's process"

log = logging.getLogger(__name__)

T = TypeVar("T")


class EndedAtStart(Exception):
    """The engine was asked to end while it started, or the API process is gone."""


async def until_shutdown(start: Coroutine[Any, Any, T], link: Link[FromEngine, ToEngine]) -> T:
    """Return the result of `start`, which is cancelled when `Shutdown` comes. The API process sends nothing else before
    `EngineReady`.

    Raises `EndedAtStart`, and what `start` raises.
    """
    starting, receiving = asyncio.create_task(start), asyncio.create_task(link.receive())
    try:
        await asyncio.wait({starting, receiving}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
        with suppress(PeerLost):
            message = receiving.result()
            assert isinstance(message, Shutdown), f"expected no message before the engine is ready, got {message}"
        raise EndedAtStart
    finally:
        await cancel_all((starting, receiving))


LOADING, CAPTURING = 10, 40
"""Progress units of the work after the compilations; comparable with `warmup.parts.Part.weight`."""


class StartProgress:
    """Sends a start's current activity and progress, in units, to the API process."""

    def __init__(
        self, send: Callable[[EngineWarming], None], compiling: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`compiling`: units of the compilations."""
        self._send, self._compiling, self._clock = send, compiling, clock
        self._first: tuple[float, int] | None = None
        self._what, self._began = "", clock()

    def compiles(self, what: str, done: int) -> None:
        self._tell(what, done)

    def loads(self, what: str) -> None:
        self._tell(what, self._compiling)

    def captures(self, done: int, total: int) -> None:
        """`done` of `total` graphs are captured."""
        self._tell("capturing CUDA graphs", self._compiling + LOADING + CAPTURING * done // total)

    def _tell(self, what: str, done: int) -> None:
        total, now = self._compiling + LOADING + CAPTURING, self._clock()
        if what != self._what:
            if self._what:
                log.info("%s took %.1f s", self._what, now - self._began)
            self._what, self._began = what, now
        if self._first is None:
            self._first = now, done  # cached work took no time
        began, before = self._first
        left = round((now - began) * (total - done) / (done - before), 1) if done > before else None
        self._send(EngineWarming(what=what, done=done, total=total, seconds_left=left))


async def follow(sock: socket.socket, told: Callable[[str, int], None]) -> tuple[str, ...]:
    """Follow the warm-up's process until it has ended, and with it all processes that used the GPU. Returns notes for
    the operator. `told` is called with the current activity and the finished units. On cancellation, the process
    ends."""
    channel = await AsyncChannel[WarmUpTask, Progress].open(sock, msgspec.msgpack.Decoder(Progress))
    last: Progress | None = None
    try:
        while True:
            last = await channel.receive()
            if not last.ended:
                told(WAITS if last.waiting else COMPILES, last.done)
    except PeerLost:
        pass
    finally:
        await channel.close()
    if last is None or not last.ended:
        log.error("%s", DIED)
        return (DIED,)
    return tuple(last.notes)
