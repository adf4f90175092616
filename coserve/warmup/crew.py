"""Runs the parts of a warm-up in worker processes, several at a time; what fails, hangs or dies is told, not raised."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Protocol

from coserve.warmup.messages import PartReport
from coserve.warmup.parts import Schedule

log = logging.getLogger(__name__)

HANGS = 180.0
"""Seconds without a report after which a worker is taken to hang: a layer's compilation reports nothing in between."""


class Worker(Protocol):
    """A process that does one part after another."""

    def ask(self, part: str) -> None: ...
    async def report(self) -> PartReport | None:
        """The next report; None: the process has ended."""
        ...

    async def close(self) -> None:
        """Ends the process."""
        ...


class _End(Enum):
    """How a part ended, for its worker."""

    DONE = auto()
    LOST = auto()
    """The worker is of no use any more."""
    NO_MEMORY = auto()


class CacheFault(Exception):
    """A part failed in a way that a corrupt cache explains."""


class Crew:
    """`start` makes a worker. `changed` is called after each change of the schedule."""

    def __init__(
        self,
        schedule: Schedule,
        start: Callable[[], Awaitable[Worker]],
        *,
        workers: int,
        changed: Callable[[], None],
        suspect_cache: bool,
        hangs: float = HANGS,
    ) -> None:
        """`suspect_cache`: raise `CacheFault` where a part fails without a known reason."""
        self._schedule, self._start, self._workers = schedule, start, workers
        self._changed, self._suspect_cache, self._hangs = changed, suspect_cache, hangs
        self._turn, self._left = asyncio.Condition(), workers

    async def run(self) -> None:
        """Returns once every part is complete or has failed; no worker is left. Raises `CacheFault`."""
        tasks = [asyncio.create_task(self._work()) for _ in range(self._workers)]
        try:
            for done in asyncio.as_completed(tasks):
                await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        """One worker after another: one that fails is replaced. None is kept where nothing is left for it."""
        worker: Worker | None = None
        try:
            while (part := await self._next()) is not None:
                if worker is None:
                    try:
                        worker = await self._start()
                    except OSError as error:
                        await self._failed(part, f"no process: {error.strerror}")
                        continue
                end = await self._do(worker, part)
                if end is not _End.DONE:
                    await worker.close()
                    worker = None
                if end is _End.NO_MEMORY:
                    return  # the others have more
        finally:
            if worker is not None:
                with contextlib.suppress(Exception):
                    await worker.close()

    async def _next(self) -> str | None:
        async with self._turn:
            while (part := self._schedule.next()) is None:
                if self._schedule.ended:
                    return None
                await self._turn.wait()
            return part

    async def _do(self, worker: Worker, part: str) -> _End:
        began = time.monotonic()
        worker.ask(part)
        while True:
            try:
                async with asyncio.timeout(self._hangs):
                    report = await worker.report()
            except TimeoutError:
                await self._failed(part, f"no progress for {self._hangs:.0f} s")
                return _End.LOST
            if report is None:
                self._suspect(part, "its process died")
                await self._failed(part, "its process died")
                return _End.LOST
            if report.trouble == "memory" and self._left > 1:
                self._left -= 1
                log.warning("warm-up: %s found too little memory; one process fewer goes on: %s", part, report.why)
                async with self._turn:
                    self._schedule.put_back(part)
                    self._turn.notify_all()
                return _End.NO_MEMORY
            if report.trouble is not None:
                if report.trouble == "error":
                    self._suspect(part, report.why)
                await self._failed(part, report.why)
                return _End.DONE if report.trouble == "unsupported" else _End.LOST
            if report.done >= report.total:
                log.info("warm-up: %s done in %.1f s", part, time.monotonic() - began)
                async with self._turn:
                    self._schedule.finish(part)
                    self._turn.notify_all()
                self._changed()
                return _End.DONE
            self._schedule.advance(part, report.done, report.total)
            self._changed()

    def _suspect(self, part: str, why: str) -> None:
        if self._suspect_cache:
            raise CacheFault(f"{part}: {why}")

    async def _failed(self, part: str, why: str) -> None:
        log.warning("warm-up: %s failed: %s", part, why)
        async with self._turn:
            self._schedule.fail(part, why)
            self._turn.notify_all()
        self._changed()
