"""Keeps one engine alive: starts it, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coserve.cli.daemon.engine_process import EngineDied, EngineProcess
from coserve.core.errors import LoraServersMissing, StartupError
from coserve.core.processes import how_ended

if TYPE_CHECKING:
    from coserve.api.service import Service

log = logging.getLogger(__name__)


EARLY, FIRST, MOST = 10.0, 0.5, 5
"""Back-off of engine restarts. A death is early at startup or within `EARLY` seconds of service. After the n-th
consecutive early death the pause is `FIRST` * 2^(n-1) seconds; after the `MOST`-th the daemon gives up. An engine that
served longer is restarted at once."""


class Supervisor:
    """Keeps an engine running. `start` returns a ready engine; it raises `EngineDied`, or a `StartupError` if a restart
    would fail too."""

    def __init__(
        self,
        start: Callable[[], Awaitable[EngineProcess]],
        service: Service,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._service, self._clock = start, service, clock
        self.attached = asyncio.Event()
        """Set once an engine is attached."""

    async def run(self) -> None:
        """Keep an engine alive until cancelled; then stop it.

        Raises `StartupError` if the engine refuses to start, or dies early repeatedly.
        """
        deaths = 0
        while True:
            end = await self._run_engine()
            deaths = deaths + 1 if end.served < EARLY else 0
            if deaths >= MOST:
                raise StartupError(f"the engine died {deaths} times in a row, the last time it {end.text}; see the log")
            pause = FIRST * 2.0 ** (deaths - 1) if deaths else 0.0
            when = f"in {pause:.1f} s (early death {deaths} in a row, number {MOST} ends the daemon)"
            log.error(
                "the engine %s; it is started again %s",
                end.text,
                when if deaths else "at once",
                extra={"fields": {"status": end.status, "seconds": round(end.served, 3)}},
            )
            note = f"the engine {end.text} and is being started again"
            self._service.engine_failed(note, started=end.started)
            await asyncio.sleep(pause)

    async def _run_engine(self) -> _EngineExit:
        try:
            engine = await self._start()
        except EngineDied as died:
            return _EngineExit(died.status, loss=died.loss)
        except LoraServersMissing as error:
            if not self.attached.is_set():
                raise
            return _EngineExit(0, loss=error.message)
        ended = asyncio.create_task(engine.wait())
        tasks: list[asyncio.Task[object]] = [ended]
        try:
            attaching = asyncio.create_task(self._service.attach(engine.link, engine.ready, engine.ranks))
            tasks.append(attaching)
            await asyncio.wait({ended, attaching}, return_when=asyncio.FIRST_COMPLETED)
            if not attaching.done():
                return _EngineExit(ended.result(), loss=engine.loss)
            attaching.result()
            began = self._clock()
            self.attached.set()
            disconnected = asyncio.create_task(self._service.disconnected())
            hung = asyncio.create_task(self._service.engine_hung())
            tasks += [disconnected, hung]
            await asyncio.wait({ended, disconnected, hung}, return_when=asyncio.FIRST_COMPLETED)
            served = self._clock() - began
            unreadable = disconnected.result() if disconnected.done() else None
            if hung.done() and not (ended.done() or disconnected.done()):
                engine.end(hung.result())
                self._service.engine_lost()  # fail its requests now, before the process is gone
        finally:
            for task in tasks:
                task.cancel()
            await engine.stop()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._service.engine_lost()
        return _EngineExit(await engine.wait(), served, started=True, unreadable=unreadable, loss=engine.loss)


@dataclass(frozen=True)
class _EngineExit:
    """How an engine ended, and its seconds of service."""

    status: int
    served: float = 0.0
    started: bool = False
    unreadable: Exception | None = None
    """The error in reading its messages, if it was stopped for that."""
    loss: str | None = None
    """How it hung, or which process was lost, if it was stopped for that."""

    @property
    def text(self) -> str:
        when = f"after {self.served:.0f} s of service" if self.started else "while it started"
        if self.unreadable is not None:
            return f"was stopped {when}: its messages could not be read ({type(self.unreadable).__name__})"
        if self.loss is not None:
            return f"was stopped {when}: {self.loss}"
        return f"{how_ended(self.status)} {when}"
