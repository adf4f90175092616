"""The warm-up's process: `python -m coserve.warmup.process FD`, with the `WarmUpTask` as JSON on standard input.

FD is one end of a socket pair. The process writes `Progress` lines to it, and ends when the other end closes. Its worker
processes import torch, it does not (`fork_client.ForkServer`); they end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

import msgspec

from coserve.config import config_from_json
from coserve.logs.setup import LogSettings, set_up_logging
from coserve.processes import obey_parent
from coserve.warmup.fork_client import ForkServer
from coserve.warmup.key import compiler_environment
from coserve.warmup.messages import Progress, WarmUpTask
from coserve.warmup.parts import Part, all_parts
from coserve.warmup.warmer import warm


async def run(task: WarmUpTask, parts: tuple[Part, ...], sock: socket.socket, server: ForkServer) -> None:
    """Warm up with workers of `server`, which is closed, until all is done or the other end of `sock` closes."""
    reader, writer = await asyncio.open_connection(sock=sock)

    def report(progress: Progress) -> None:
        progress = msgspec.structs.replace(progress, notes=[*progress.notes, *server.notes])
        writer.write(msgspec.json.encode(progress) + b"\n")

    warming = asyncio.create_task(warm(task, parts, server.start_worker, report))
    parent_gone = asyncio.create_task(reader.read())
    await asyncio.wait({warming, parent_gone}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if warming.done():
            warming.result()
        else:
            warming.cancel()
            await asyncio.wait({warming})
    finally:
        await server.close()
    parent_gone.cancel()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()  # so that all lines are sent


def main() -> None:
    obey_parent()
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=WarmUpTask)
    config = config_from_json(task.config.encode())
    set_up_logging("warm", LogSettings.of(config))
    os.environ.update(compiler_environment(Path(task.folder)))
    asyncio.run(run(task, all_parts(config.tp), socket.socket(fileno=int(sys.argv[1])), ForkServer(task)))


if __name__ == "__main__":
    main()
