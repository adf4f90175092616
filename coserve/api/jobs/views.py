"""Jobs and their events as the API shows them."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncGenerator, Callable, Mapping

import msgspec

from coserve.api.jobs.conflicts import waiting_text
from coserve.api.jobs.watchers import JobWatchers
from coserve.api.stopping import Stopping
from coserve.core.errors import QueueFull
from coserve.core.schemas.documents import DocumentJob
from coserve.core.schemas.jobs import Job, JobEvent, JobList
from coserve.core.training.jobs import JobState
from coserve.lora.files.targets import with_alpha
from coserve.state.registry.records import JobRecord
from coserve.state.registry.registry import Registry
from coserve.state.thread import RegistryThread

MAX_WATCHERS = 256
"""Most event streams at once."""
NOT_RUNNING = (JobState.QUEUED, JobState.PAUSED)


Line = Mapping[str, int | None]
"""Queue position of each queued job, 0 is next, and None of each paused one."""


class JobViews:
    """Reads jobs and events from the registry."""

    def __init__(self, registry: RegistryThread, watchers: JobWatchers, stopping: Stopping) -> None:
        self._registry, self._watchers, self._stopping = registry, watchers, stopping
        self._watching = 0

    async def get(self, id: str) -> Job:
        """Return one job. Raises `JobNotFound`."""
        return await self.show(await self.record(id))

    async def record(self, id: str) -> JobRecord:
        """Return one job's record. Raises `JobNotFound`."""
        return await self._registry(lambda registry: registry.job(id))

    async def records(
        self, after: str | None, limit: int, keep: Callable[[JobRecord], bool] = lambda _: True
    ) -> builtins.list[JobRecord]:
        """Return the records of jobs older than `after` that `keep` accepts, newest first. Raises `JobNotFound` for an
        unknown `after`."""
        return await self._registry(lambda registry: registry.jobs(after=after, limit=limit, keep=keep))

    async def latest_events(self, id: str, before: int | None, limit: int) -> builtins.list[JobEvent]:
        """Return a job's events before number `before`, newest first. Raises `JobNotFound`."""
        return await self._registry(lambda registry: registry.latest_events(id, before=before, limit=limit))

    async def list(self, after: str | None, limit: int) -> JobList:
        """Return jobs, newest first. Raises `JobNotFound` for an unknown `after`."""
        records = await self.records(after, limit + 1)
        line = await self._registry(_line)
        return JobList(data=[job_view(record, line) for record in records[:limit]], has_more=len(records) > limit)

    async def states(self) -> builtins.list[JobState]:
        """Return the states of all unfinished jobs."""
        return await self._registry(lambda registry: [record.state for record in registry.unfinished()])

    async def _events(self, id: str, after: int) -> builtins.list[JobEvent]:
        return await self._registry(lambda registry: registry.events(id, after=after))

    async def show(self, record: JobRecord) -> Job:
        return job_view(record, await self._registry(_line) if record.state in NOT_RUNNING else {})

    async def events(self, id: str, after: int, heartbeat: float) -> AsyncGenerator[JobEvent | None, None]:
        """Yield events after `after`, live until the job's end; None after every `heartbeat` seconds without one.

        Raises, before the first event, `JobNotFound` and `QueueFull`; `EngineUnavailable` when the daemon stops.
        """
        if self._watching >= MAX_WATCHERS:
            raise QueueFull(f"{MAX_WATCHERS} streams of events are open already")
        self._watching += 1
        try:
            with self._watchers.watch(id) as changed:
                while True:
                    changed.clear()
                    record = await self.record(id)
                    events = await self._events(id, after)
                    for event in events:
                        after = event.seq
                        yield event
                    if events:
                        continue  # there may be more than one page
                    if record.state.terminal:
                        return
                    if self._stopping.error is not None:  # the client may reconnect to the next daemon
                        raise self._stopping.error
                    try:
                        async with asyncio.timeout(heartbeat):
                            await changed.wait()
                    except TimeoutError:
                        yield None
        finally:
            self._watching -= 1


def _line(registry: Registry) -> Line:
    records = registry.jobs(limit=-1, states=NOT_RUNNING, everyones=True)
    queued = [record.spec.id for record in reversed(records) if record.state is JobState.QUEUED]
    return dict.fromkeys(record.spec.id for record in records) | {id: place for place, id in enumerate(queued)}


def job_view(record: JobRecord, line: Line) -> Job:
    """Return a job in the API's format. `line`: needed for jobs that are queued or paused."""
    spec, metrics = record.spec, record.metrics
    return Job(
        id=spec.id,
        adapter=spec.adapter,
        version=spec.version,
        state=record.state,
        waiting=record.waiting
        if record.after is None or record.state.terminal
        else waiting_text(record, paused=line.get(record.after, 0) is None),
        created_at=record.created_at,
        started_at=record.started_at,
        finished_at=record.finished_at,
        queue_position=line.get(spec.id) if record.state is JobState.QUEUED else None,
        step=record.step,
        total_steps=record.total_steps,
        progress=1.0 if record.state is JobState.SUCCEEDED else record.step / max(1, record.total_steps),
        eta=record.eta,
        loss=None if metrics is None else metrics.loss,
        metrics=metrics,
        trained_tokens=record.trained_tokens,
        rows=spec.rows,
        tokens=spec.tokens,
        target_tokens=spec.target_tokens,
        continue_from=_source(record),
        teacher=None if spec.teacher is None else str(spec.teacher.ref),
        lora=with_alpha(spec.lora),
        training=spec.training,
        metadata=record.metadata,
        error=record.error,
        result=None if record.result is None else str(record.result),
        rows_cut=spec.rows_cut,
        auto=list(spec.auto),
        notes=list(record.notes),
        samples=list(record.samples),
        stopped_early=record.state is JobState.SUCCEEDED and record.step < record.total_steps,
        document=_document(record),
        test=record.test,
        published_step=_published_step(record) if record.state is JobState.SUCCEEDED else None,
    )


def _document(record: JobRecord) -> DocumentJob | None:
    """Return the document's progress; in the phase `training` its items are the job's steps."""
    document = record.document
    if document is None or document.phase != "training":
        return document
    return msgspec.structs.replace(document, done=record.step, total=record.total_steps)


def _published_step(record: JobRecord) -> int:
    best = None if record.metrics is None else record.metrics.best_step
    return record.step if best is None else best


def _source(record: JobRecord) -> str | None:
    """Return the adapter that the job continues; only the name while its version is not published yet."""
    if record.after is not None:
        return record.spec.adapter
    return None if record.spec.init_from is None else str(record.spec.init_from)
