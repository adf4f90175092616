"""The engine's end of the warm-up process's socket."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import msgspec

from coserve.core.link.channel import AsyncChannel
from coserve.core.link.link import PeerLost
from coserve.engine.warmup.messages import Progress, WarmUpTask

log = logging.getLogger(__name__)

COMPILES = "compiling kernels"
WAITS = "waiting for another daemon, which compiles into the same cache folder"
DIED = "warm-up: its process died; what is missing is compiled in the engine's process"


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
