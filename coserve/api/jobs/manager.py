"""Accepts jobs durably, sends them to the engine, pauses, resumes and cancels them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial

import msgspec

from coserve.admission.ranks import unmet_need
from coserve.api.adapters.inspection import Inspection
from coserve.api.documents.jobs import DocumentJobs
from coserve.api.jobs.chain import Decision, JobChain
from coserve.api.jobs.conflicts import fork_notes, last_job, refuse_conflict, serialised
from coserve.api.jobs.evaluation import JobTest
from coserve.api.jobs.idempotency import KEY, IdempotencyKeys, check_same_request, request_digests
from coserve.api.jobs.notes import record_cut_rows, replacement_notes
from coserve.api.jobs.preparation import Show
from coserve.api.jobs.recorder import JobRecorder
from coserve.api.jobs.sources import UploadedRows
from coserve.api.jobs.submission import Submission
from coserve.api.jobs.views import JobViews
from coserve.api.node import Node
from coserve.api.stopping import Stopping
from coserve.core import errors
from coserve.core.access.principal import idempotency_key, principal
from coserve.core.cancellation import Commits, cancel_all, keep_task
from coserve.core.link.jobs import CancelJob, PauseJob, ResumeJob, StartJob
from coserve.core.schemas.documents import DocumentJob
from coserve.core.schemas.jobs import DeletedJob, FinetuneRequest, Job, JobList
from coserve.core.schemas.service import ErrorInfo
from coserve.core.training.jobs import JobState
from coserve.data.corpus.staging import PendingCorpus
from coserve.data.corpus.tokenized import Corpus
from coserve.data.documents.pending import PendingDocument
from coserve.data.offload.pool import HelperPool
from coserve.state.durable import remove_dir, remove_unlisted
from coserve.state.failpoints import failpoint
from coserve.state.recover import drop_unrecorded_checkpoints, recover
from coserve.state.registry.records import JobOrigin, JobRecord
from coserve.state.registry.registry import Registry

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""A job is paused after this many engines in a row died while it ran, if it made no progress in between."""
ENGINE_CRASHED = ErrorInfo(
    code=errors.EngineCrashed.code,
    message=f"the engine died {MAX_DEATHS} times while this job trained, and no step was new in between; "
    "resume it to try again",
)

ANSWER_SECONDS = 30.0
"""Most seconds that a pause or a cancellation waits for the engine."""
KEY_PATIENCE = 60.0
"""Seconds that a repeated request waits for the first one. Many clients time out after a minute, too."""


class JobManager:
    def __init__(
        self, node: Node, helpers: HelperPool, recorder: JobRecorder, stopping: Stopping, documents: DocumentJobs
    ) -> None:
        self._config, self._folder, self._registry, self._engine = node.config, node.folder, node.registry, node.engine
        self._recorder, self._submission = recorder, Submission(node, helpers)
        self._chain = JobChain(node, recorder, Inspection(helpers))
        recorder.ended = self._ended
        self._documents = documents
        documents.prepared = self._train_document
        self._releases: set[asyncio.Task[None]] = set()
        self._closed = False
        self.views = JobViews(node.registry, recorder.watchers, stopping)
        self._started: set[str] = set()
        """Ids of jobs sent to the current engine."""
        self._deaths: dict[str, tuple[int, int]] = {}
        """For each job: how many engines in a row died while it ran, since it first reached its furthest step, and that
        step."""
        self._wanted: dict[str, JobState] = {}
        """States that users requested and the engine has not reported yet; the next engine gets them too."""
        self._changes = asyncio.Lock()
        """Held while the registry and the engine's jobs are changed together."""
        self._commits, self._keys = Commits(), IdempotencyKeys(KEY_PATIENCE)
        self._stopping = stopping

    @property
    def unfinished(self) -> int:
        """Number of jobs that are prepared, queued or trained. Paused ones, and those that wait for another job, are
        left out."""
        stats = self._engine.stats
        return self._documents.preparing + (0 if stats is None else stats.jobs)

    # ---- engines

    async def recover(self) -> None:
        """Make the registry and the files agree, once, before anything else. Raises `StartupError` for a damaged
        registry."""
        async with self._changes:
            await self._registry.with_reserve(lambda registry: recover(registry, self._folder))

    async def attach(self, open_link: Callable[[], None]) -> None:
        """Send the unfinished jobs to a new engine, oldest first."""
        async with self._changes:
            await self._recorder.settled()
            what, retries = "jobs of the last engine", self._recorder.retries
            unfinished = await retries.run(what, lambda: self._registry(lambda registry: registry.unfinished()))
            trained = self._recorder.publishing
            died = {record.spec.id: self._died(record) for record in unfinished if record.spec.id not in trained}
            records = await retries.run(what, lambda: self._registry.with_reserve(partial(self._requeue, died)))
            left = {record.spec.id for record in records}
            # Last, because an engine that dies meanwhile cancels this without having run the jobs.
            self._deaths = {id: deaths for id, deaths in died.items() if id in left and deaths[0] < MAX_DEATHS}
            open_link()
            self._wanted = {id: wanted for id, wanted in self._wanted.items() if id in left}
            self._started.clear()
            for record in records:
                if record.after is not None:
                    self._begin(self._follow(record.spec.id))  # its predecessor may have ended while no engine ran
                else:
                    await self._start_if_possible(record)
        self._recorder.watchers.notify_all()

    def _died(self, record: JobRecord) -> tuple[int, int]:
        """Return the job's entry in `_deaths`, now that one more engine has died."""
        count, step = self._deaths.get(record.spec.id, (0, -1))
        if record.state is not JobState.RUNNING:
            return count, step
        return (1, record.step) if record.step > step else (count + 1, step)

    def _requeue(self, died: Mapping[str, tuple[int, int]], registry: Registry) -> list[JobRecord]:
        """Return the jobs that the new engine gets, in their new states."""
        kept = []
        for record in registry.unfinished():
            id = record.spec.id
            if id not in died:
                continue  # it is trained already and waits to be published
            wanted = self._wanted.get(id)
            if wanted is not None and record.state.can_become(wanted):
                record = registry.set_state(id, wanted)
            elif record.state is JobState.RUNNING:
                if died[id][0] >= MAX_DEATHS:
                    record = registry.set_state(id, JobState.PAUSED, error=ENGINE_CRASHED)
                else:
                    record = registry.set_state(
                        id, JobState.QUEUED, message="interrupted: the engine died while it ran"
                    )
            elif record.waiting is not None:
                record = registry.clear_waiting(id)
            if not record.state.terminal:
                drop_unrecorded_checkpoints(self._folder, record)
                kept.append(record)
        return kept

    def _start(self, record: JobRecord) -> None:
        """Send a job to the engine, if there is one; otherwise the next engine gets it."""
        if record.after is not None or record.state.terminal:
            return  # it waits for another job, or failed when that job ended
        spec, paused = record.spec, record.state is JobState.PAUSED
        if not record.prepared:
            if not paused:
                self._documents.begin(spec.id)
            return
        if self._engine.offer(StartJob(spec=spec, paused=paused)):
            self._started.add(spec.id)

    async def _start_if_possible(self, record: JobRecord) -> JobRecord:
        """Start an accepted job, or let it wait for a daemon that can train it; its record then says what it needs."""
        need = await self._unmet_need(record)
        if need is None:
            self._start(record)
            return record
        log.warning("job %s waits: it %s", record.spec.id, need)
        if record.state is not JobState.QUEUED:
            return record
        try:
            return await self._registry.with_reserve(lambda registry: registry.record_waiting(record.spec.id, need))
        except errors.CoserveError as error:
            log.warning("job %s: %s", record.spec.id, error.message)
            return record

    async def _unmet_need(self, record: JobRecord) -> str | None:
        """Return what a job needs that this daemon lacks; None: nothing, or not known yet."""
        if self._engine.ready is None or record.after is not None or record.state.terminal:
            return None
        base = self._engine.spec
        if record.base_fingerprint != base.fingerprint:
            return f"needs another base; this daemon has {base.name}"
        return await asyncio.to_thread(unmet_need, record.spec, base, ranks=self._config.tp)

    async def close(self) -> None:
        """Wait for changes in progress. Jobs that wait for others stay waiting."""
        self._closed = True
        await self._documents.close()
        await cancel_all(self._releases)
        await self._commits.close()

    # ---- jobs that wait for others

    def _ended(self, id: str) -> None:
        """After a job's end is committed, start the jobs that waited for it. While the daemon stops, its next start
        does this."""
        self._begin(self._release(id))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        if self._closed:
            work.close()
            return
        keep_task(work, self._releases)

    async def _release(self, ended: str) -> None:
        for id in await self._chain.followers(ended):
            self._begin(self._follow(id))

    async def _follow(self, id: str) -> None:
        """Start a waiting job if the one before it has ended. Reads that fail are retried."""
        with suppress(errors.EngineUnavailable):  # the first engine's start does it
            await self._recorder.retries.run(f"job {id}", lambda: self._try_to_follow(id))

    async def _try_to_follow(self, id: str) -> None:
        while (decision := await self._chain.decide(id)) is not None:
            if await self._commits.run(self._apply(decision)):
                break

    async def _apply(self, decision: Decision) -> bool:
        """Apply a decision; return False if a new one is needed."""
        async with self._changes:
            record = await self._chain.apply(decision)
            if record is None:
                return False
            if record.spec.id not in self._started:
                await self._start_if_possible(record)
            self._recorder.watchers.notify(record.spec.id)  # the job may have ended instead
            return True

    async def list(self, after: str | None, limit: int) -> JobList:
        """Return `JobViews.list`, plus the corpora that are being tokenised."""
        page = await self.views.list(after, limit)
        return page if after is not None else msgspec.structs.replace(page, preparing=self._submission.preparing)

    # ---- submission

    async def submit(
        self,
        request: FinetuneRequest,
        uploaded: UploadedRows,
        key: str | None,
        show: Show = lambda _: None,
        origin: JobOrigin | None = None,
    ) -> Job:
        """Accept a job; it is durable when this returns. The same request with the same `key` returns the first job
        again, after waiting for the request that creates it. `show` is told the progress of a large corpus. `origin`:
        the files of OpenAI's API that are `uploaded`.

        Raises `InvalidRequest`, `CorpusError` subclasses (with the line), `AdapterNotFound`, `ForbiddenPath`,
        `QueueFull`, `StorageFull`, `JobTooLarge`, `AdapterTooLarge`, `IdempotencyMismatch` (another request had the
        key), `EngineUnavailable` (no engine has started yet, or the daemon stops).
        """
        spec = self._engine.spec
        if key is not None and not (1 <= len(key) <= 128 and key.isascii() and key.isprintable()):
            raise errors.InvalidRequest("expected 1 to 128 printable characters", field=KEY)
        digests = {} if key is None else await asyncio.to_thread(request_digests, request, uploaded)
        async with self._keys.alone(None if key is None else idempotency_key(key)):
            made = None if key is None else await self._registry(lambda registry: registry.job_with_key(key))
            if made is None:
                await self._registry(self._check_max_jobs)
                async with self._stopping.interrupts():
                    record, corpus, test = await self._submission.prepare(request, uploaded, spec, show, origin)
                record = msgspec.structs.replace(record, request_digests=digests)
                # From here on the job is created even if the client leaves.
                made = await self._commits.run(self._accept(request, record, corpus, test, key))
            else:
                check_same_request(made, digests)
        return await self.views.show(made)

    def _check_max_jobs(self, registry: Registry) -> None:
        jobs = registry.unfinished()
        if (count := len(jobs)) >= self._config.max_jobs:
            paused = sum(job.state is JobState.PAUSED for job in jobs)
            hint = f" (paused: {paused}; resume or cancel them)" if paused else ""
            why = f"{count} jobs wait, run or are paused{hint}; the daemon takes {self._config.max_jobs}"
            raise errors.QueueFull(why, retry_after=10)
        project = principal().project
        most = registry.quota(project).jobs
        if most is not None and registry.unfinished_of(project) >= most:
            raise errors.QuotaExceeded(
                f"project {project} has {most} jobs already, as many as its quota", retry_after=10
            )

    async def _accept(
        self,
        request: FinetuneRequest,
        record: JobRecord,
        corpus: PendingCorpus | PendingDocument,
        test: JobTest | None,
        key: str | None,
    ) -> JobRecord:
        """Write the corpus and test rows to disk, then the job's row, then tell the engine."""
        id, adapter = record.spec.id, record.spec.adapter

        def create(registry: Registry) -> JobRecord:
            registry.check_name(adapter)
            if key is None or registry.job_with_key(key) is None:
                self._check_max_jobs(registry)
                refuse_conflict(registry, request)
            job = msgspec.structs.replace(record.spec, version=registry.next_version(adapter))
            after: str | None = record.after
            notes = record.notes
            if serialised(request):
                earlier = last_job(registry, adapter)  # another job may have come, or this one ended, meanwhile
                if earlier is not None and earlier.base_fingerprint == record.base_fingerprint:
                    after = earlier.spec.id
            if after is None:
                notes += replacement_notes(registry, job) + fork_notes(registry, job)
            else:
                job = msgspec.structs.replace(job, init_from=None, init_digests=None)
            new = msgspec.structs.replace(record, spec=job, notes=notes, after=after)
            for source in new.sources:
                registry.adapter(source.id, source.version)  # raises if it was deleted meanwhile
            made = registry.create_job(new, idempotency_key=key)
            if made.spec.id == id and not isinstance(corpus, PendingDocument) and corpus.rows_cut:
                record_cut_rows(registry, id, corpus)
            return made

        try:
            await asyncio.to_thread(corpus.save, self._folder.corpus(id))
            if test is not None:
                await asyncio.to_thread(test.save, self._folder.test(id))
            async with self._changes:
                made = await self._registry(create)
                if made.spec.id == id:
                    self._start(made)
                    self._recorder.watchers.notify(id)
        except BaseException:
            await asyncio.to_thread(remove_dir, self._folder.job(id))
            raise
        if made.spec.id != id:  # the key already had a job
            await asyncio.to_thread(remove_dir, self._folder.job(id))
        elif made.after is not None:
            self._begin(self._follow(id))  # the job before it may have ended meanwhile
        failpoint("api.before_reply")
        return made

    async def _train_document(self, record: JobRecord, corpus: Corpus, document: DocumentJob) -> None:
        """Start the training of a document's job, whose corpus was made."""
        spec, steps = await self._submission.complete(record, corpus)
        async with self._changes:
            await asyncio.to_thread(corpus.save, self._folder.corpus(spec.id))
            record = await self._registry.with_reserve(lambda registry: registry.record_corpus(spec, steps, document))
            await self._start_if_possible(record)
        self._recorder.watchers.notify(spec.id)

    # ---- pause, resume, cancel

    async def pause(self, id: str) -> Job:
        """Pause a job. Raises `JobNotFound`, `WrongJobState`."""
        return await self._transition(id, JobState.PAUSED, PauseJob(id=id))

    async def cancel(self, id: str) -> Job:
        """Cancel a job. Raises `JobNotFound`, `WrongJobState`."""
        return await self._transition(id, JobState.CANCELLED, CancelJob(id=id))

    async def delete(self, id: str) -> DeletedJob:
        """Delete a job's record and events, then its files; durable when this returns. Its adapter stays. Raises
        `JobNotFound`, `WrongJobState` for a job that has not ended, `StorageError`."""
        return await self._commits.run(self._delete(id))

    async def _delete(self, id: str) -> DeletedJob:
        record = await self._recorder.change(id, lambda registry: registry.delete_job(id))
        await remove_unlisted(self._folder.job(id), f"job {id}")
        if record is None:
            return DeletedJob(id=id, adapter=None, result=None)
        result = None if record.result is None else str(record.result)
        return DeletedJob(id=id, adapter=record.spec.adapter, result=result)

    async def resume(self, id: str) -> Job:
        """Queue a paused job again. Raises `JobNotFound`, `WrongJobState`."""
        record = await self._commits.run(self._requeue_paused(id))
        self._recorder.watchers.notify(id)
        return await self.views.show(record)

    async def _requeue_paused(self, id: str) -> JobRecord:
        async with self._changes:
            record = await self._registry(lambda registry: registry.job(id))
            if record.state is not JobState.PAUSED:
                raise errors.WrongJobState(f"expected a paused job, got one that is {record.state}", field="id")
            record = await self._registry.with_reserve(lambda registry: registry.set_state(id, JobState.QUEUED))
            self._wanted.pop(id, None)  # left by a pause whose caller stopped waiting
            if id in self._started:
                self._engine.offer(ResumeJob(id=id))
            else:
                record = await self._start_if_possible(record)
        return record

    async def _transition(self, id: str, wanted: JobState, message: PauseJob | CancelJob) -> Job:
        """Pause or cancel a job and wait for it, at most `ANSWER_SECONDS`."""
        with self._recorder.watchers.watch(id) as changed:
            record = await self._commits.run(self._request_transition(id, wanted, message))
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    while record.state is not wanted and not record.state.terminal:
                        await changed.wait()
                        changed.clear()
                        if self._engine.alive:
                            record = await self._registry(lambda registry: registry.job(id))
                        else:
                            record = await self._commits.run(self._change_without_engine(id, wanted))
            except TimeoutError:
                log.warning("job %s: still %s, though it was to be %s", id, record.state, wanted)
        if (record.state is wanted or record.state.terminal) and self._wanted.get(id) is wanted:
            del self._wanted[id]  # unless a later request asked for another state
        if record.state.terminal and record.state is not wanted:
            raise errors.WrongJobState(f"the job is {record.state}: it cannot become {wanted}", field="id")
        return await self.views.show(record)

    async def _request_transition(self, id: str, wanted: JobState, message: PauseJob | CancelJob) -> JobRecord:
        async with self._changes:
            record = await self._registry(lambda registry: registry.job(id))
            if not record.state.can_become(wanted):
                raise errors.WrongJobState(f"the job is {record.state}: it cannot become {wanted}", field="id")
            if self._engine.alive and id in self._started:
                self._wanted[id] = wanted
                self._engine.send(message)
                return record
            return await self._change(id, wanted)

    async def _change_without_engine(self, id: str, wanted: JobState) -> JobRecord:
        """Change the job's state in the registry after all messages of an engine that died before it answered."""
        async with self._changes:
            await self._recorder.settled()
            record = await self._registry(lambda registry: registry.job(id))
            if self._engine.alive or not record.state.can_become(wanted):
                return record
            return await self._change(id, wanted)

    async def _change(self, id: str, wanted: JobState) -> JobRecord:
        self._documents.stop(id)
        commit = self._recorder.end if wanted is JobState.CANCELLED else self._recorder.change
        return await commit(id, lambda registry: registry.set_state(id, wanted))
