"""Jobs on all ranks: rank 0 decides what a job does next, and every rank advances it by the same micro-steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from coserve.adapter_store.store import AdapterStore
from coserve.admission.treatment import Treatment
from coserve.cancellation import Cancellation
from coserve.engine.ranks.commands import (
    AbandonJob,
    AdvanceJob,
    BeginJob,
    CopySnapshot,
    DropAdapterCopy,
    DropJob,
    ForgetLoad,
    GatherJob,
    LimitJob,
    LoadJob,
    PrepareJob,
    ReadAdapter,
    ReleaseMemory,
)
from coserve.engine.ranks.followers import Followers, RankLost
from coserve.errors import CoserveError, EngineFault, RequestOutOfMemory, StorageError
from coserve.finetune.outcome import Outcome, how_to_retry, judge
from coserve.finetune.publication import snapshot_without_memory, waiting_for_disk
from coserve.finetune.trainer import Trainer, TrainerSettings
from coserve.link import (
    FromEngine,
    JobCheckpoint,
    JobFailed,
    JobNote,
    JobProgress,
    JobSnapshot,
    JobStarted,
    JobSucceeded,
    JobWaiting,
)
from coserve.model.agreement import FailedTogether
from coserve.model.base import Base
from coserve.state.folder import DataFolder
from coserve.types import JobSpec

log = logging.getLogger(__name__)


class RankedTrainer(Trainer):
    """The trainer of rank 0. It tells the other ranks what it does; checkpoints and adapters are written here alone."""

    def __init__(
        self, base: Base, store: AdapterStore, folder: DataFolder, settings: TrainerSettings, *, followers: Followers
    ) -> None:
        super().__init__(base, store, folder, settings)
        self._followers = followers

    def load(self, spec: JobSpec, cancellation: Cancellation) -> Callable[[], JobStarted]:
        """See `Trainer.load`. Raises what any rank raised. Where the load has ended and is not committed, `cancellation` frees the
        memory of the other ranks."""
        answers, load = self._followers.ask(LoadJob(spec=spec)), super().load

        def forget() -> None:
            with suppress(RankLost):  # the engine ends, and must be able to
                self._followers.send(ForgetLoad(answers.number))

        try:
            start = load(spec, cancellation)
            answers.wait()
            cancellation.on_cancel(forget)
        except Exception:
            forget()
            raise

        def begin() -> JobStarted:
            started = start()
            self._followers.send(BeginJob(spec.id, answers.number, started.resumed_from))
            return started

        return begin

    def preparation(self, job: str) -> Callable[[Cancellation], None] | None:
        """See `Trainer.preparation`."""
        prepare = super().preparation(job)
        if prepare is None:
            return None

        def on_all(cancellation: Cancellation) -> None:
            with cancellation.postponed():  # else the job may be dropped first, and followers would not know it
                answers = self._followers.ask(PrepareJob(job=job))
            try:
                prepare(cancellation)
            finally:
                answers.settle()
            answers.wait()

        return on_all

    def advance(
        self, job: str, micro_steps: int | None, others: Sequence[str] = (), shared_tokens: int | None = None
    ) -> list[FromEngine]:
        """See `Trainer.advance`; each job trains alone. An error of any rank ends the job alone, or begins its optimizer step again on all ranks, with
        less memory or without graphs. Raises `EngineFault` alone."""
        with self._followers.asked(AdvanceJob(job=job, micro_steps=micro_steps)) as answers:
            own = self.attempt(job, micro_steps)
            theirs = [Outcome(answer.value, answer.code, answer.message) for answer in answers.settle()]
        verdict = judge([own, *theirs])
        if verdict.retry:
            how = how_to_retry(verdict, graphs=self.has_graphs)
            self._followers.send(AbandonJob(job, how))
            notes = self.retry(job, how)
            if notes or not how.lower:
                return notes
        if verdict.code:
            return [JobFailed(id=job, code=verdict.code, message=verdict.message)]
        return [] if own.metrics is None else [JobProgress(id=job, metrics=own.metrics)]

    def checkpoint(self, job: str) -> Callable[[], JobCheckpoint] | None:
        """See `Trainer.checkpoint`. Raises `JobOutOfMemory` where any rank finds too little, and `FailedTogether`."""
        with gathered(job):
            return super().checkpoint(job)

    def publication(self, job: str) -> Callable[[], Callable[[], JobSucceeded | JobWaiting]]:
        """See `Trainer.publication`. Followers read the files that rank 0 wrote; `JobWaiting` also where one of them cannot now. Where any rank has no
        host memory for its copy, none keeps one: the first request reads the files."""
        with gathered(job):
            write = super().publication(job)
        ref = self._jobs[job].loop.result

        def run() -> Callable[[], JobSucceeded | JobWaiting]:
            publish = write()
            if not self._folder.adapter(ref).is_dir():  # it waits for the disk
                return publish
            try:
                self._followers.ask(ReadAdapter(adapter=ref, digests=None)).wait()
            except StorageError as error:
                drop()  # of those that could
                waiting = waiting_for_disk(job, error)
                return lambda: waiting
            except RequestOutOfMemory as error:
                log.warning("job %s: %s: the first request reads the files", job, error)
                drop()
                return lambda: JobSucceeded(id=job, ref=ref)
            except CoserveError as error:
                raise EngineFault(f"adapter {ref}, which was just written, cannot be read: {error}") from error
            return lambda: commit(publish)

        def commit(publish: Callable[[], JobSucceeded | JobWaiting]) -> JobSucceeded | JobWaiting:
            message = publish()
            if not self._store.state(ref).in_memory:
                drop()
            return message

        def drop() -> None:
            self._followers.send(DropAdapterCopy(ref))

        return run

    def snapshot(self, job: str) -> Callable[[], Callable[[], JobSnapshot | JobNote]]:
        """See `Trainer.snapshot`. Each rank copies its part of what all of them gathered; `JobNote` where one of them has no memory for it."""
        with gathered(job):
            own = self._begin_snapshot(job)
        answers = self._followers.ask(CopySnapshot(job=job, adapter=own.ref))

        def drop() -> None:
            self._followers.send(DropAdapterCopy(own.ref))  # of those that have one

        def run() -> Callable[[], JobSnapshot | JobNote]:
            try:
                try:
                    publish = own.copy()
                finally:
                    answers.settle()  # nobody is told to drop a copy that is being made
                copied = all(answers.wait())
            except Exception:
                drop()
                raise

            def commit() -> JobSnapshot | JobNote:
                message = publish() if copied else snapshot_without_memory(job, own.step)
                if isinstance(message, JobNote):
                    drop()
                return message

            return commit

        return run

    def limit(self, job: str, treatment: Treatment) -> None:
        """See `Trainer.limit`."""
        self._followers.send(LimitJob(job, treatment))
        super().limit(job, treatment)

    def release_memory(self) -> bool:
        """See `Trainer.release_memory`."""
        self._followers.send(ReleaseMemory())
        return super().release_memory()

    def abandon(self, job: str, *, finish_update: bool = False) -> None:
        """See `Trainer.abandon`. Ranks have no updates in slices: none is ever suspended in one."""
        self._followers.send(AbandonJob(job))
        super().abandon(job, finish_update=finish_update)

    def drop(self, job: str) -> None:
        """See `Trainer.drop`."""
        self._followers.send(DropJob(job))
        super().drop(job)

    def _gathering(self, job: str, weights_only: bool) -> None:
        self._followers.send(GatherJob(job, weights_only))


@contextmanager
def gathered(job: str) -> Iterator[None]:
    """Around what may gather a job's state from all ranks. An error that all of them have had is the job's alone."""
    try:
        yield
    except Exception as error:
        if isinstance(error, FailedTogether | RankLost) or isinstance(error.__cause__, FailedTogether):
            raise
        raise EngineFault(
            f"the state of job {job} could not be gathered on rank 0, and other ranks may wait for it"
        ) from error
