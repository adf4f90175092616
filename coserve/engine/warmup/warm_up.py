"""A warm-up: check the cache folder, compile what is missing, update the manifest.

`python -m coserve.engine.warmup.warm_up FD` is the warm-up process of a starting engine. FD is one end of a channel:
the process receives a `WarmUpTask`, sends `Progress`, and ends when the other end closes. It imports no torch. As a
thread of the engine it would delay the engine's imports.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from coserve.config import config_from_json
from coserve.core.link.channel import AsyncChannel
from coserve.core.link.link import PeerLost
from coserve.core.logs import set_up_logging
from coserve.core.processes import obey_parent
from coserve.engine.warmup import manifest
from coserve.engine.warmup.key import compiler_environment
from coserve.engine.warmup.manifest import cache_lock
from coserve.engine.warmup.parts import Part, PartSchedule, Progress, WarmUpTask, all_parts
from coserve.engine.warmup.workers import REPORT_TIMEOUT, ProcessWorker, Worker, run_parts

log = logging.getLogger(__name__)

Report = Callable[[Progress], None]


async def warm_up(task: WarmUpTask, report: Report) -> None:
    """Run the warm-up that `task` describes; see `compile_parts`."""
    parts = all_parts(config_from_json(task.config.encode()).tp)
    start_worker = partial(ProcessWorker.start, task, compiler_environment(Path(task.folder)))
    await compile_parts(task, parts, start_worker, report)


async def compile_parts(
    task: WarmUpTask,
    parts: tuple[Part, ...],
    start_worker: Callable[[], Awaitable[Worker]],
    report: Report,
    *,
    report_timeout: float = REPORT_TIMEOUT,
) -> None:
    """Complete all `parts`. `report` is called after each change; the last progress has `ended`. A folder whose
    manifest is empty or lists a changed file is cleared, and everything is compiled again. Waits while another process
    holds the folder."""
    folder = Path(task.folder)

    async def found() -> tuple[manifest.Manifest, PartSchedule]:
        known = await asyncio.to_thread(manifest.load, folder, task.fields)
        return known, PartSchedule(parts, known.parts.get(task.shape, ()))

    def waits() -> None:
        log.info("warm-up: another process compiles into the same cache folder")
        report(_progress(schedule, waiting=True))

    known, schedule = await found()
    if not schedule.ended:
        async with cache_lock(folder, waits):
            known, schedule = await found()
            if not known.parts:
                await asyncio.to_thread(manifest.clear, folder)
            report(_progress(schedule))
            try:
                await run_parts(
                    schedule,
                    start_worker,
                    task.workers,
                    lambda: report(_progress(schedule)),
                    report_timeout=report_timeout,
                )
            finally:  # also if it is stopped, so that the next start continues from there
                try:
                    manifest.save(folder, known, task.shape, schedule.complete)
                except OSError as error:
                    log.warning("warm-up: the next start compiles again: cannot write %s: %s", folder, error.strerror)
    report(_progress(schedule, ended=True))


def _progress(schedule: PartSchedule, *, waiting: bool = False, ended: bool = False) -> Progress:
    done, total = schedule.progress
    failed = dict[str, list[str]]()
    for name, why in schedule.failed.items():
        failed.setdefault(why, []).append(name)
    notes = [f"warm-up: {', '.join(names)} failed: {why}" for why, names in failed.items()]
    return Progress(done, total, notes, waiting=waiting, ended=ended)


async def serve(sock: socket.socket) -> None:
    """Receive a task and warm up until all is done or the other end of `sock` closes."""
    channel = await AsyncChannel[Progress, WarmUpTask].open(sock, msgspec.msgpack.Decoder(WarmUpTask))
    try:
        task = await channel.receive()
        set_up_logging("warm", config_from_json(task.config.encode()).logs)
        working = asyncio.create_task(warm_up(task, channel.send))
        parent_gone = asyncio.create_task(channel.receive())
        await asyncio.wait({working, parent_gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
        parent_gone.cancel()
        await asyncio.wait({working, parent_gone})
        if not working.cancelled():
            working.result()
    except PeerLost:  # before the task came
        pass
    finally:
        await channel.close()  # so that all messages are sent


def main() -> None:
    obey_parent()
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
