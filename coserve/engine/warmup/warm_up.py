"""A warm-up: check the cache folder, compile what is missing in worker processes, update the manifest. A part that
fails, hangs or crashes is reported, not raised.

`python -m coserve.engine.warmup.warm_up FD` is the warm-up process of a starting engine. FD is one end of a channel:
the process receives a `WarmUpTask`, sends `Progress`, and ends when the other end closes. It imports no torch. As a
thread of the engine it would delay the engine's imports.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from coserve.config import config_from_json
from coserve.core.cancellation import cancel_all
from coserve.core.link.channel import AsyncChannel, WorkerProcess
from coserve.core.link.link import PeerLost
from coserve.core.logs import set_up_logging
from coserve.core.processes import obey_parent
from coserve.engine.warmup import manifest
from coserve.engine.warmup.key import compiler_environment
from coserve.engine.warmup.manifest import cache_lock
from coserve.engine.warmup.parts import Part, PartReport, PartSchedule, Progress, WarmUpTask, all_parts

log = logging.getLogger(__name__)

MODULE = "coserve.engine.warming.process"
REPORT_TIMEOUT = 180.0
"""Seconds without a report after which a worker counts as hung; it reports nothing while one layer compiles."""
END_TIMEOUT = 5.0
"""Seconds that an idle worker has to end."""
DIED = PartReport(0, 1, "memory", "its process died")
"""Most likely killed because the machine ran out of memory."""


class Worker(Protocol):
    """A process that runs one part at a time."""

    async def run(self, part: str) -> None: ...
    async def report(self) -> PartReport:
        """Return the next report; `DIED` if the process has ended or its output is invalid."""
        ...

    async def close(self) -> None:
        """End the process and wait for it, so that its GPU memory is free."""
        ...


class ProcessWorker:
    """Implements `Worker`."""

    def __init__(self, process: WorkerProcess[WarmUpTask | str, PartReport]) -> None:
        self._process, self._idle = process, True

    @classmethod
    async def start(cls, task: WarmUpTask, environment: Mapping[str, str], module: str = MODULE) -> ProcessWorker:
        """Start the process. Raises `OSError`."""
        decoder = msgspec.msgpack.Decoder(PartReport)
        process = await WorkerProcess[WarmUpTask | str, PartReport].start(module, decoder, environment=environment)
        process.channel.send(task)
        return cls(process)

    async def run(self, part: str) -> None:
        self._idle = False
        self._process.channel.send(part)

    async def report(self) -> PartReport:
        try:
            found = await self._process.receive()
        except PeerLost:
            return DIED
        self._idle = found.failure is None and found.done >= found.total
        return found

    async def close(self) -> None:
        await self._process.end(END_TIMEOUT if self._idle else 0.0)  # an idle one ends its child processes first


async def run_parts(
    schedule: PartSchedule,
    start_worker: Callable[[], Awaitable[Worker]],
    workers: int,
    changed: Callable[[], None],
    *,
    report_timeout: float = REPORT_TIMEOUT,
) -> None:
    """Run all incomplete parts of the schedule in up to `workers` processes. `changed` is called after each change.
    Returns once every part is complete or has failed, and every process has ended."""
    pool = _Pool(schedule, start_worker, changed, report_timeout, left=workers)
    tasks = [asyncio.create_task(pool.work()) for _ in range(workers)]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


class _Pool:
    def __init__(
        self,
        schedule: PartSchedule,
        start_worker: Callable[[], Awaitable[Worker]],
        changed: Callable[[], None],
        report_timeout: float,
        left: int,
    ) -> None:
        self._schedule, self._start_worker, self._report_timeout = schedule, start_worker, report_timeout
        self._told, self._left = changed, left
        self._repeated = set[str]()
        """Parts that ran out of memory once."""
        self._changed = asyncio.Condition()

    async def work(self) -> None:
        """Run parts in one process, which is replaced after a failure. A part that ran out of memory is repeated once;
        then this process is not replaced if there are others, as the machine cannot hold as many."""
        worker: Worker | None = None
        try:
            while (part := await self._next()) is not None:
                began = time.monotonic()
                try:
                    worker = worker or await self._start_worker()
                    await worker.run(part)
                    report = await self._result(worker, part)
                except OSError as error:
                    report = PartReport(0, 1, "error", f"no process: {error.strerror}")
                if report.failure in ("memory", "error") and worker is not None:
                    await worker.close()
                    worker = None
                if report.failure is None:
                    log.info("warm-up: %s done in %.1f s", part, time.monotonic() - began)
                    await self._change(partial(self._schedule.finish, part))
                elif report.failure == "memory" and part not in self._repeated:
                    log.warning("warm-up: %s runs again: %s", part, report.reason)
                    self._repeated.add(part)
                    await self._change(partial(self._schedule.put_back, part))
                    if self._left > 1:
                        self._left -= 1
                        return
                else:
                    log.warning("warm-up: %s failed: %s", part, report.reason)
                    for_good = report.failure == "unsupported"
                    await self._change(partial(self._schedule.finish, part, report.reason, for_good=for_good))
        finally:
            if worker is not None:
                await worker.close()

    async def _next(self) -> str | None:
        """Wait until a part may start, and return its name; None once all have ended."""
        async with self._changed:
            while (part := self._schedule.next()) is None and not self._schedule.ended:
                await self._changed.wait()
            return part

    async def _result(self, worker: Worker, part: str) -> PartReport:
        """Return the part's last report."""
        while True:
            try:
                async with asyncio.timeout(self._report_timeout):
                    report = await worker.report()
            except TimeoutError:
                return PartReport(0, 1, "error", f"no progress for {self._report_timeout:.0f} s")
            if report.failure is not None or report.done >= report.total:
                return report
            self._schedule.advance(part, report.done, report.total)
            self._told()

    async def _change(self, change: Callable[[], None]) -> None:
        async with self._changed:
            change()
            self._changed.notify_all()
        self._told()


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
