"""The API process's connection to the engine: its state, its description of the base, and sending."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

import msgspec

from coserve.core.errors import EngineUnavailable
from coserve.core.gpu_memory import MemoryModel, PoolShape
from coserve.core.health import EngineRanks, EngineStatus, RankInfo, Warming, starting_line
from coserve.core.link.engine import ALIVE, EngineReady, EngineWarming, SetLogLevel
from coserve.core.link.link import FromEngine, Link, ToEngine
from coserve.core.link.stats import EngineStats
from coserve.core.types import AdapterRef, BaseSpec

SILENCE = 2 * ALIVE
"""Seconds without a message from an engine that has work, after which `/health` reports it."""
LOOK = 0.5
"""Seconds between two checks of an engine that may hang."""


class EngineClient:
    """The link to the current engine, if there is one. `starts`: number of engines attached so far. `clock` returns
    seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent_since: float | None = None
        """Time of the last message of an engine that has work; None while it has none."""
        self._link: Link[ToEngine, FromEngine] | None = None
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self.residents: frozenset[AdapterRef] = frozenset()
        """Adapters in memory, according to the last stats."""
        self.warmup: EngineWarming | None = None
        """Last start-up report; kept once the engine is ready."""
        self.ranks: EngineRanks | None = None
        """Processes of the current or last engine, if it has several."""
        self.starts = 0
        self.troubles: tuple[str, ...] = ()
        """Why the last engine died, until there is a new one."""
        self._failed_starts = 0
        self._log_level: SetLogLevel | None = None
        """The log level set at run time; None: it was not set."""
        self._watchers: list[Callable[[], None]] = []

    @property
    def alive(self) -> bool:
        return self._link is not None

    @property
    def status(self) -> EngineStatus:
        return "ready" if self.alive else "starting"

    @property
    def warming(self) -> Warming | None:
        """Start-up progress of an engine; None if it has not reported yet, or is ready."""
        report = self.warmup
        if self.alive or report is None:
            return None
        return Warming(done=report.done, total=report.total, seconds_left=report.seconds_left, what=report.what)

    @contextlib.contextmanager
    def watched(self, watcher: Callable[[], None]) -> Iterator[None]:
        """Call `watcher` after each change of `status` or `warming`. It must not raise."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def _changed(self) -> None:
        for watcher in self._watchers:
            watcher()

    @property
    def rank_states(self) -> tuple[RankInfo, ...]:
        """State of each process of the engine, or of the one being started in its place; empty for a single process."""
        states = () if self.ranks is None else self.ranks.states()
        if self.alive or not self.troubles:
            return states
        return tuple(RankInfo(rank=each.rank, state="starting", silent=0.0, behind=0) for each in states)

    @property
    def spec(self) -> BaseSpec:
        """The base, also while its engine is being restarted. Raises `EngineUnavailable` before the first engine."""
        return self._last_ready.spec

    @property
    def memory(self) -> MemoryModel | None:
        """Model that predicts the memory of jobs; None if memory is not planned."""
        return None if self.ready is None else self.ready.memory

    @property
    def pool(self) -> PoolShape:
        """The page pool. Raises as `spec`."""
        return self._last_ready.pool

    @property
    def _last_ready(self) -> EngineReady:
        if self.ready is None:
            raise EngineUnavailable(starting_line(self.warming))
        return self.ready

    def name(self) -> str:
        """The base's name; empty before the first engine."""
        return "" if self.ready is None else self.ready.spec.name

    @property
    def kv_tokens(self) -> int:
        """Tokens of the KV cache. Raises as `spec`."""
        return self._last_ready.kv_tokens

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that fits the base's context and the KV pool. Raises as `spec`."""
        return min(self.spec.context, self.kv_tokens)

    def send(self, message: ToEngine) -> None:
        """Send a message. Raises `EngineUnavailable` if there is no engine."""
        if self._link is None:
            raise EngineUnavailable(starting_line(self.warming, "the engine stopped and is being restarted"))
        self._link.send(message)
        if self._silent_since is None:
            self._silent_since = self._clock()

    def offer(self, message: ToEngine) -> bool:
        """Send a message if there is an engine; return whether there is one."""
        if self._link is not None:
            self.send(message)
        return self._link is not None

    def received(self, message: FromEngine) -> None:
        """Note the time of a message; call it for each one. An engine reports about once a second while it works, and
        once when its work is done."""
        idle = isinstance(message, EngineStats) and not (message.waiting or message.running or message.jobs)
        self._silent_since = None if idle else self._clock()
        if isinstance(message, EngineStats):
            self.stats, self.residents = message, frozenset(message.resident)

    @property
    def silence(self) -> tuple[str, ...]:
        """A note if an engine that has work is silent: its process or its device has stalled."""
        seconds = 0.0 if self._silent_since is None else self._clock() - self._silent_since
        return () if seconds < SILENCE else (f"the engine has said nothing for {seconds:.0f} s, though it has work",)

    async def hung(self, limit: float) -> None:
        """Wait until the engine has had work but sent nothing for `limit` seconds; forever if that is 0. Checks are
        counted instead of seconds, so a daemon that was suspended itself does not blame the engine."""
        looks, since = 0, self._silent_since
        while limit == 0 or looks * LOOK < limit:
            await asyncio.sleep(LOOK)
            looks = looks + 1 if since is not None and since == self._silent_since else 0
            since = self._silent_since

    def open(self, link: Link[ToEngine, FromEngine], ready: EngineReady, ranks: EngineRanks | None) -> None:
        self._link, self.ready, self.ranks, self.troubles = link, ready, ranks, ()
        self._silent_since = None
        if self._log_level is not None:
            link.send(self._log_level)
        self.starts += 1
        self._changed()

    def set_log_level(self, level: str) -> None:
        """Change the log level of this engine and of those started in its place."""
        self._log_level = SetLogLevel(level=level)
        if self._link is not None:
            self._link.send(self._log_level)

    def starting(self, report: EngineWarming) -> None:
        """Record the progress of an engine that starts."""
        self.warmup = report
        self._changed()

    @property
    def restarts(self) -> int:
        """Number of restarts, failed ones included."""
        return max(0, self.starts - 1) + self._failed_starts

    def failed(self, note: str, *, started: bool) -> None:
        """Record that the engine died. `started`: it had become ready."""
        self.troubles, self.warmup = (note,), None
        self._failed_starts += not started

    def note(self, notes: tuple[str, ...]) -> None:
        """Replace the notes that the engine sent when it became ready."""
        if self.ready is not None:
            self.ready = msgspec.structs.replace(self.ready, notes=notes)

    def lost(self) -> None:
        self._link = self.stats = self.warmup = self._silent_since = None
        self.residents = frozenset()
        self._changed()
