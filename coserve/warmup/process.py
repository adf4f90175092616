"""The warm-up's process: `python -m coserve.warmup.process FD`, with the `WarmUpTask` as JSON on standard input.

FD is one end of a socket pair. The process writes `Progress` lines to it, and ends when the other end closes. Its worker
processes import torch, it does not; they end with it.
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
from coserve.processes import obey_parent, start_child
from coserve.warmup.key import cache_environment
from coserve.warmup.messages import DoPart, PartReport, Progress, WarmUpTask
from coserve.warmup.parts import Part, all_parts
from coserve.warmup.warmer import warm

WORKER = "coserve.engine.warming.worker_process"


class ProcessWorker:
    """Implements `worker_pool.Worker`: a process at the other end of a socket pair."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, task: WarmUpTask) -> ProcessWorker:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                process = await start_child(WORKER, theirs, stdin=asyncio.subprocess.PIPE)
            except OSError:
                writer.close()
                raise
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(task))
        process.stdin.close()
        return cls(process, reader, writer)

    def run_part(self, part: str) -> None:
        self._writer.write(msgspec.json.encode(DoPart(part)) + b"\n")

    async def next_report(self) -> PartReport | None:
        try:
            line = await self._reader.readline()
        except ConnectionError:  # it died before it read its part
            return None
        return msgspec.json.decode(line, type=PartReport) if line.endswith(b"\n") else None

    async def close(self) -> None:
        self._writer.close()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def _run(task: WarmUpTask, parts: tuple[Part, ...], sock: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)

    def report(progress: Progress) -> None:
        writer.write(msgspec.json.encode(progress) + b"\n")

    warming = asyncio.create_task(warm(task, parts, lambda: ProcessWorker.start(task), report))
    parent_gone = asyncio.create_task(reader.read())
    await asyncio.wait({warming, parent_gone}, return_when=asyncio.FIRST_COMPLETED)
    if warming.done():
        warming.result()
    else:
        warming.cancel()
        await asyncio.wait({warming})
    parent_gone.cancel()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()  # so that all lines are sent


def main() -> None:
    obey_parent()
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=WarmUpTask)
    config = config_from_json(task.config.encode())
    set_up_logging("warm", LogSettings.of(config))
    os.environ.update(cache_environment(Path(task.folder)))
    asyncio.run(_run(task, all_parts(config.tp), socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
