"""The engine's end of a warm-up's process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import msgspec

from coserve.engine.warmup.messages import Progress

log = logging.getLogger(__name__)

COMPILES = "compiling kernels"
WAITS = "waiting for another daemon, which compiles into the same cache folder"
DIED = "warm-up: its process died; what is missing is compiled in the engine's process"


async def follow(sock: socket.socket, told: Callable[[str, int], None]) -> tuple[str, ...]:
    """Returns once the process has ended, and with it all that used the GPU: notes for the operator. `told`: what it
    does, and the units that are done. Cancelled, it ends the process."""
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
    last: Progress | None = None
    try:
        while line := await reader.readline():
            last = msgspec.json.decode(line, type=Progress)
            if not last.ended:
                told(WAITS if last.waiting else COMPILES, last.done)
    except (ConnectionError, ValueError):  # it was killed while it wrote
        last = None
    finally:
        writer.close()
    if last is None or not last.ended:
        log.error("%s", DIED)
        return (DIED,)
    return tuple(last.notes)
