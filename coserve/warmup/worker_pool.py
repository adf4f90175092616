"""Runs the parts of a warm-up in worker processes. A part that fails, hangs or crashes is reported, not raised."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Container
from enum import Enum, auto
from typing import Protocol

from coserve.warmup.messages import PartReport
from coserve.warmup.parts import PartSchedule

log = logging.getLogger(__name__)

REPORT_TIMEOUT = 180.0
"""Seconds without a report after which a worker counts as hung: it reports nothing while one layer compiles."""


class Worker(Protocol):
    """A process that runs one part at a time."""

    def run_part(self, part: str) -> None: ...
    async def next_report(self) -> PartReport | None:
        """None: the process has ended, or wrote what is no report."""
        ...

    async def close(self) -> None:
        """Kill the process."""
        ...


class _Outcome(Enum):
    """What becomes of the worker after a part."""

    KEEP = auto()
    REPLACE = auto()
    REPEAT = auto()
    """It is replaced, and the part runs again."""
    NO_MEMORY = auto()
    """As `REPEAT`, with one worker fewer: the GPU cannot hold this many."""


class CacheFault(Exception):
    """A part failed in a way that a corrupt cache explains."""


class WorkerPool:
    """Runs the parts of a schedule in up to `workers` processes."""

    def __init__(
        self,
        schedule: PartSchedule,
        start_worker: Callable[[], Awaitable[Worker]],
        *,
        workers: int,
        changed: Callable[[], None],
        may_fail: Container[str],
        report_timeout: float = REPORT_TIMEOUT,
    ) -> None:
        """`changed` is called after each change of the schedule. `may_fail`: parts that may fail without a known reason;
        the failure of another one raises `CacheFault`. `report_timeout`: seconds without a report after which a worker counts as hung."""
        self._schedule, self._start_worker, self._workers = schedule, start_worker, workers
        self._changed, self._may_fail, self._report_timeout = changed, may_fail, report_timeout
        self.unexplained: set[str] = set()
        """Parts that have failed without a known reason."""
        self._died: set[str] = set()
        """Parts whose process has died once."""
        self._schedule_changed = asyncio.Condition()
        self._left = workers
        """Processes that may run at once: one fewer after each that ran out of memory, but at least one."""

    async def run(self) -> None:
        """Returns once every part is complete or has failed, and every worker is closed. Raises `CacheFault`."""
        tasks = [asyncio.create_task(self._work()) for _ in range(self._workers)]
        try:
            for done in asyncio.as_completed(tasks):
                await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        """Run parts in one worker process, which is replaced when it fails."""
        worker: Worker | None = None
        try:
            while (part := await self._next_part()) is not None:
                if worker is None:
                    try:
                        worker = await self._start_worker()
                    except OSError as error:
                        await self._fail(part, f"no process: {error.strerror}")
                        continue
                outcome = await self._run_part(worker, part)
                if outcome is not _Outcome.KEEP:
                    await worker.close()
                    worker = None
                if outcome in (_Outcome.REPEAT, _Outcome.NO_MEMORY):  # once this worker's memory is free
                    retire = outcome is _Outcome.NO_MEMORY and self._left > 1
                    self._left -= 1 if retire else 0
                    await self._put_back(part)
                    if retire:
                        return
        finally:
            if worker is not None:
                with contextlib.suppress(Exception):
                    await worker.close()

    async def _next_part(self) -> str | None:
        """Waits until a part may start; None once all have ended."""
        async with self._schedule_changed:
            while (part := self._schedule.next()) is None:
                if self._schedule.ended:
                    return None
                await self._schedule_changed.wait()
            return part

    async def _run_part(self, worker: Worker, part: str) -> _Outcome:
        began, alone = time.monotonic(), self._left == 1
        worker.run_part(part)
        while True:
            try:
                async with asyncio.timeout(self._report_timeout):
                    report = await worker.next_report()
            except TimeoutError:
                await self._fail(part, f"no progress for {self._report_timeout:.0f} s")
                return _Outcome.REPLACE
            if report is None and part not in self._died:  # maybe killed: the machine ran out of memory
                log.warning("warm-up: the process of %s died; it runs again in a new one", part)
                self._died.add(part)
                return _Outcome.REPEAT
            if report is None:
                report = PartReport(0, 1, "error", "its process died twice")
            if report.failure == "memory" and not alone:
                log.warning("warm-up: out of memory in %s; it runs again with fewer processes: %s", part, report.reason)
                return _Outcome.NO_MEMORY
            if report.failure is not None:
                if report.failure == "error":
                    if part not in self._may_fail:
                        raise CacheFault(f"{part}: {report.reason}")
                    self.unexplained.add(part)
                await self._fail(part, report.reason)
                return _Outcome.KEEP if report.failure == "unsupported" else _Outcome.REPLACE
            if report.done >= report.total:
                log.info("warm-up: %s done in %.1f s", part, time.monotonic() - began)
                async with self._schedule_changed:
                    self._schedule.finish(part)
                    self._schedule_changed.notify_all()
                self._changed()
                return _Outcome.KEEP
            self._schedule.advance(part, report.done, report.total)
            self._changed()

    async def _put_back(self, part: str) -> None:
        async with self._schedule_changed:
            self._schedule.put_back(part)
            self._schedule_changed.notify_all()

    async def _fail(self, part: str, reason: str) -> None:
        log.warning("warm-up: %s failed: %s", part, reason)
        async with self._schedule_changed:
            self._schedule.fail(part, reason)
            self._schedule_changed.notify_all()
        self._changed()
