"""Jobs: accept them durably, give them to the engine, steer them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from coserve.api.engine_client import EngineClient
from coserve.api.jobs.recorder import JobRecorder
from coserve.api.jobs.submission import Submission
from coserve.api.jobs.views import JobViews
from coserve.config import Config
from coserve.corpus.staging import PendingCorpus
from coserve.errors import CoserveError, EngineCrashed, EngineUnavailable, InvalidRequest, QueueFull, WrongJobState
from coserve.link import CancelJob, PauseJob, ResumeJob, StartJob
from coserve.offload.pool import HelperPool
from coserve.pretrained.tokenizer import Tokenizer
from coserve.schemas import ErrorInfo, FinetuneRequest, Job
from coserve.state.commits import Commits
from coserve.state.durable import remove_dir
from coserve.state.failpoints import failpoint
from coserve.state.folder import DataFolder
from coserve.state.records import JobRecord
from coserve.state.recover import drop_unrecorded_checkpoints, recover
from coserve.state.registry import Registry
from coserve.state.thread import RegistryThread
from coserve.types import JobSpec, JobState

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Engines that one job may end, without a checkpoint in between, before it is taken for the cause."""


class JobManager:
    """All jobs. `answer_timeout`: seconds that an order waits for the engine to obey."""

    def __init__(
        self,
        config: Config,
        folder: DataFolder,
        registry: RegistryThread,
        tokenizer: Tokenizer,
        helpers: HelperPool,
        engine: EngineClient,
        recorder: JobRecorder,
        *,
        answer_timeout: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._folder, self._registry = config, folder, registry
        self._engine, self._recorder = engine, recorder
        self._answer_timeout = answer_timeout
        self._submission = Submission(config, folder, registry, tokenizer, helpers, clock)
        self.views = JobViews(registry, recorder)
        self._started: set[str] = set()
        """Jobs that the engine of this moment knows."""
        self._wanted: dict[str, JobState] = {}
        """Orders that the engine has not obeyed yet; they hold for the next engine too."""
        self._changes = asyncio.Lock()
        """Held where registry and engine must agree on what was said to the engine."""
        self._commits = Commits()

    # ---- the engine comes and goes

    async def recover(self) -> None:
        """Bring registry and files into agreement, once, before anything else. Raises `StartupError` for a damaged registry."""
        async with self._changes:
            await self._registry.with_reserve(lambda registry: recover(registry, self._folder))

    async def attach(self, open_link: Callable[[], None]) -> None:
        """Give the unfinished jobs to a new engine, oldest first."""
        async with self._changes:
            await self._recorder.settled()
            what = "jobs of the last engine"
            unfinished = await self._recorder.insist(lambda: self._registry(_unfinished), what)
            ran = frozenset(id for state, id in unfinished if state is JobState.RUNNING)
            records = await self._recorder.insist(
                lambda: self._registry.with_reserve(partial(self._requeue, ran=ran)), what
            )
            self._recorder.deaths.update(ran)  # last: an engine that dies meanwhile cancels this, and never ran them
            open_link()
            left = {record.spec.id for record in records}
            self._wanted = {id: wanted for id, wanted in self._wanted.items() if id in left}
            self._started.clear()
            for record in records:
                if record.base_fingerprint == self._engine.spec.fingerprint:
                    self._start(record.spec, paused=record.state is JobState.PAUSED)
                else:
                    log.warning("job %s waits for another base than this one", record.spec.id)
        self._recorder.announce_all()

    def _requeue(self, registry: Registry, *, ran: frozenset[str]) -> list[JobRecord]:
        """The jobs that a new engine gets, when the last one died while it `ran` those."""
        kept = []
        for record in registry.unfinished():
            id = record.spec.id
            wanted = self._wanted.get(id)
            if self._recorder.deaths[id] + (id in ran) >= MAX_DEATHS:
                error = ErrorInfo(
                    code=EngineCrashed.code, message=f"the engine died {MAX_DEATHS} times while it ran this job"
                )
                registry.set_state(id, JobState.FAILED, error=error)
                continue
            if wanted is not None and record.state.can_become(wanted):
                record = registry.set_state(id, wanted)
            elif record.state is JobState.RUNNING:
                record = registry.set_state(id, JobState.QUEUED, message="interrupted: the engine died while it ran")
            if not record.state.terminal:
                drop_unrecorded_checkpoints(self._folder, record)
                kept.append(record)
        return kept

    def _start(self, spec: JobSpec, *, paused: bool = False) -> None:
        """Tell the engine of a job; without an engine, the next one will be told."""
        with suppress(EngineUnavailable):
            self._engine.send(StartJob(spec=spec, paused=paused))
            self._started.add(spec.id)

    async def close(self) -> None:
        """Finish what was begun."""
        await self._commits.close()

    # ---- accept

    async def submit(self, request: FinetuneRequest, upload: Path | None, key: str | None) -> Job:
        """Accept a job: when this returns, it is durable. The same `key` again gives the first job.

        Raises `InvalidRequest`, `CorpusError` leaves (with the line), `AdapterNotFound`, `ForbiddenPath`, `QueueFull`,
        `StorageFull`, `EngineUnavailable` (no engine has started yet).
        """
        spec = self._engine.spec
        if key is not None and not (1 <= len(key) <= 128 and key.isascii() and key.isprintable()):
            raise InvalidRequest("expected 1 to 128 printable characters", field="Idempotency-Key")
        if key is not None and (first := await self._registry(lambda registry: registry.job_with_key(key))) is not None:
            return await self.views.show(first)
        await self._registry(self._check_room)
        record, corpus = await self._submission.prepare(request, upload, spec)
        # A client that leaves now has a job all the same.
        return await self.views.show(await self._commits.run(self._accept(record, corpus, key)))

    def _check_room(self, registry: Registry) -> None:
        if (count := len(registry.unfinished())) >= self._config.max_jobs:
            raise QueueFull(f"{count} jobs wait or run; the daemon takes {self._config.max_jobs}", retry_after=10)

    async def _accept(self, record: JobRecord, corpus: PendingCorpus, key: str | None) -> JobRecord:
        """Corpus on disk, then the row, then the engine."""
        id, adapter = record.spec.id, record.spec.adapter

        def create(registry: Registry) -> JobRecord:
            if key is None or registry.job_with_key(key) is None:
                self._check_room(registry)
            source = record.spec.init_from
            if source is not None:
                registry.adapter(source.id, source.version)  # it may have been deleted meanwhile
            job = msgspec.structs.replace(record.spec, version=registry.next_version(adapter))
            notes = _replaced(job, registry.current_version(adapter))
            made = registry.create_job(msgspec.structs.replace(record, spec=job, notes=notes), idempotency_key=key)
            if made.spec.id == id and corpus.rows_cut:
                _say_cut(registry, id, corpus)
            return made

        try:
            await asyncio.to_thread(corpus.save, self._folder.corpus(id))
            async with self._changes:
                made = await self._registry(create)
                if made.spec.id == id:
                    self._start(made.spec)
        except BaseException:
            await asyncio.to_thread(remove_dir, self._folder.job(id))
            raise
        if made.spec.id != id:  # the key was used before
            await asyncio.to_thread(remove_dir, self._folder.job(id))
        failpoint("api.before_reply")
        return made

    # ---- steer

    async def pause(self, id: str) -> Job:
        """Raises `JobNotFound`, `WrongJobState`."""
        return await self._order(id, JobState.PAUSED, PauseJob(id=id))

    async def cancel(self, id: str) -> Job:
        """Raises `JobNotFound`, `WrongJobState`."""
        return await self._order(id, JobState.CANCELLED, CancelJob(id=id))

    async def resume(self, id: str) -> Job:
        """Put a paused job back in line. Raises `JobNotFound`, `WrongJobState`."""
        record = await self._commits.run(self._put_back(id))
        self._recorder.announce(id)
        return await self.views.show(record)

    async def _put_back(self, id: str) -> JobRecord:
        async with self._changes:
            record = await self._registry(lambda registry: registry.job(id))
            if record.state is not JobState.PAUSED:
                raise WrongJobState(f"expected a paused job, got one that is {record.state}", field="id")
            record = await self._registry.with_reserve(lambda registry: registry.set_state(id, JobState.QUEUED))
            self._wanted.pop(id, None)  # of a pause whose caller did not wait for its end
            if id in self._started:
                with suppress(EngineUnavailable):
                    self._engine.send(ResumeJob(id=id))
            elif record.base_fingerprint == self._engine.spec.fingerprint:
                self._start(record.spec)
        return record

    async def _order(self, id: str, wanted: JobState, message: PauseJob | CancelJob) -> Job:
        """Have a job paused or cancelled, and wait until it is; an engine that takes too long is not waited for."""
        with self._recorder.watch(id) as news:
            record = await self._commits.run(self._ask(id, wanted, message))
            try:
                async with asyncio.timeout(self._answer_timeout):
                    while record.state is not wanted and not record.state.terminal:
                        await news.wait()
                        news.clear()
                        if self._engine.alive:
                            record = await self._registry(lambda registry: registry.job(id))
                        else:
                            record = await self._commits.run(self._change_without_engine(id, wanted))
            except TimeoutError:
                log.warning("job %s: still %s, though it was to be %s", id, record.state, wanted)
        if (record.state is wanted or record.state.terminal) and self._wanted.get(id) is wanted:
            del self._wanted[id]  # an order that was given meanwhile stays
        if record.state.terminal and record.state is not wanted:
            raise WrongJobState(f"the job is {record.state}: it cannot become {wanted}", field="id")
        return await self.views.show(record)

    async def _ask(self, id: str, wanted: JobState, message: PauseJob | CancelJob) -> JobRecord:
        async with self._changes:
            record = await self._registry(lambda registry: registry.job(id))
            if not record.state.can_become(wanted):
                raise WrongJobState(f"the job is {record.state}: it cannot become {wanted}", field="id")
            if self._engine.alive and id in self._started:
                self._wanted[id] = wanted
                self._engine.send(message)
                return record
            return await self._change(id, wanted)

    async def _change_without_engine(self, id: str, wanted: JobState) -> JobRecord:
        """The engine died before it obeyed: the registry changes at once, after all that this engine has said."""
        async with self._changes:
            await self._recorder.settled()
            record = await self._registry(lambda registry: registry.job(id))
            if self._engine.alive or not record.state.can_become(wanted):
                return record
            return await self._change(id, wanted)

    async def _change(self, id: str, wanted: JobState) -> JobRecord:
        if wanted is JobState.CANCELLED:
            return await self._recorder.end(id, lambda registry: registry.set_state(id, wanted))
        return await self._registry.with_reserve(lambda registry: registry.set_state(id, wanted))


def _replaced(job: JobSpec, current: int | None) -> tuple[str, ...]:
    """What a job does to an adapter that has its name and that it does not go on from."""
    if current is None or (job.init_from is not None and job.init_from.id == job.adapter):
        return ()
    name, version = job.adapter, job.version
    note = (
        f"this job makes version {version} of {name!r} anew: once it succeeds, {name!r} means version {version} instead "
        f"of version {current}, which stays as {name}@{current}; to go on from it, set continue_from to {name!r}; to keep "
        "both names apart, choose another one"
    )
    return (note,)


def _unfinished(registry: Registry) -> list[tuple[JobState, str]]:
    return [(record.state, record.spec.id) for record in registry.unfinished()]


def _say_cut(registry: Registry, id: str, corpus: PendingCorpus) -> None:
    """A line in the job's story; the job is accepted whether or not it can be written."""
    try:
        text = f"{corpus.rows_cut} of {corpus.rows} rows were longer than max_length and lost a part"
        registry.record_message(id, text, level="warning")
    except CoserveError as error:
        log.warning("job %s: %s", id, error.message)
