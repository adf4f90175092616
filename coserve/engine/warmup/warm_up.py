"""A warm-up: check the cache folder, compile what is missing, update the manifest.

`python -m coserve.engine.warmup.warm_up FD`, with the `WarmUpTask` as JSON on standard input, is the warm-up process of
a starting engine. FD is one end of a socket pair: the process writes `Progress` lines to it, and ends when the other
end closes. It imports no torch. As a thread of the engine it would delay the engine's imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from coserve.config import config_from_json
from coserve.core.logs.setup import set_up_logging
from coserve.core.processes import obey_parent
from coserve.engine.warmup import manifest
from coserve.engine.warmup.key import compiler_environment
from coserve.engine.warmup.lock import cache_lock
from coserve.engine.warmup.messages import Progress, WarmUpTask
from coserve.engine.warmup.parts import Part, PartSchedule, all_parts
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


async def serve(task: WarmUpTask, sock: socket.socket) -> None:
    """Warm up until all is done or the other end of `sock` closes."""
    reader, writer = await asyncio.open_connection(sock=sock)
    working = asyncio.create_task(warm_up(task, lambda progress: writer.write(msgspec.json.encode(progress) + b"\n")))
    parent_gone = asyncio.create_task(reader.read())
    await asyncio.wait({working, parent_gone}, return_when=asyncio.FIRST_COMPLETED)
    parent_gone.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait({working})
    else:
        working.result()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()  # so that all lines are sent


def main() -> None:
    obey_parent()
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=WarmUpTask)
    set_up_logging("warm", config_from_json(task.config.encode()).logs)
    asyncio.run(serve(task, socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
