"""The engine's statistics, sent about once a second."""

from __future__ import annotations

import logging
from collections.abc import Callable

from coserve.admission.memory import HostAdmission
from coserve.core.link.link import FromEngine, Link, ToEngine
from coserve.core.link.stats import EngineStats
from coserve.core.logs import ThrottledLog
from coserve.engine.job_memory import DeviceMemory
from coserve.engine.job_runner import JobRunner
from coserve.engine.ports import Generates, StoresAdapters
from coserve.engine.stalls import Stalls
from coserve.engine.views import Views

log = logging.getLogger(__name__)

STATS_INTERVAL = 1.0
LOGGED_BACKLOG = 8 << 20
"""Bytes of unread messages to the API process from which on a warning is logged."""


class Reports:
    """Sends `EngineStats` messages."""

    def __init__(
        self,
        link: Link[FromEngine, ToEngine],
        clock: Callable[[], float],
        parts: tuple[Generates, StoresAdapters, JobRunner, Views, Stalls],
        memory: DeviceMemory | HostAdmission,
    ) -> None:
        self._link, self._parts = link, parts
        self._memory = memory if isinstance(memory, DeviceMemory) else None
        self._unread = ThrottledLog(log, "the API process does not read what the engine sends", clock)
        self._due = 0.0
        self.serve_seconds = self.train_seconds = 0.0
        """Total seconds in generation steps and in slices."""

    def send(self, now: float, *, force: bool = False) -> None:
        """Send the statistics if they are due; `force`: in any case."""
        if now < self._due and not force:
            return
        self._due = now + STATS_INTERVAL
        backlog = self._link.backlog
        if backlog >= LOGGED_BACKLOG:
            self._unread.warn(f": {backlog >> 20} MiB wait")
        generator, adapters, jobs, views, stalls = self._parts
        scheduler = generator.scheduler
        first, running = scheduler.queue.first_arrival, scheduler.started
        stats = EngineStats(
            waiting=len(scheduler.requests) - running,
            running=running,
            jobs=len(jobs),
            pages_used=generator.pages_used,
            pages_total=generator.pages_total,
            pages_adapters=generator.adapter_pages,
            allocator=generator.allocator(),
            graphs_missing=generator.graphs_missing,
            preemptions=scheduler.preemptions,
            step_adapters=scheduler.step_adapters,
            prefix_queries=scheduler.active.prefix_queries,
            prefix_hits=scheduler.active.prefix_hits,
            resident=adapters.resident(),
            host_adapter_bytes=adapters.host_bytes,
            loads=adapters.times.totals(),
            lora_servers=adapters.lora_servers,
            serve_seconds=self.serve_seconds,
            train_seconds=self.train_seconds,
            steps=views.step_counts,
            troubles=adapters.troubles + jobs.troubles + generator.troubles,
            batches=jobs.trainer.batches,
            patience_slices=views.slices.by_patience,
            starving=views.slices.starving(now),
            request_waits=0.0 if first is None else now - first,
            training_waits=views.slices.waits(now),
            train_overlap_speed=views.train_overlap_speed,
            stalls=stalls.totals(),
            backlog=backlog,
            memory=None if self._memory is None else self._memory.use(generator.adapter_pages),
        )
        self._link.send(stats)
