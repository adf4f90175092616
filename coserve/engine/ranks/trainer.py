"""Jobs on all ranks: rank 0 sends the others each operation (`Verb`) of a job's session, and all run its micro-steps
together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from coserve.core.cancellation import Cancellation
from coserve.core.errors import CoserveError, EngineFault, RequestOutOfMemory, StorageError
from coserve.core.link.jobs import JobCheckpoint, JobFailed, JobNote, JobProgress, JobSnapshot, JobSucceeded, JobWaiting
from coserve.core.link.link import FromEngine
from coserve.core.training.jobs import JobSpec
from coserve.engine.ranks import commands
from coserve.engine.ranks.followers import Answers, Followers, RankLost
from coserve.finetune.publication import snapshot_without_memory, waiting_for_disk
from coserve.finetune.sessions.session import Verb
from coserve.finetune.sessions.sessions import TrainerSettings
from coserve.finetune.sessions.trainee import Outcome, how_to_retry, judge
from coserve.finetune.trainer import LoadedJob, Trainer
from coserve.lora.store.store import AdapterStore
from coserve.model.agreement import FailedTogether
from coserve.model.base import Base
from coserve.state.folder import DataFolder

log = logging.getLogger(__name__)

ALL_OF_A_KIND = 1 << 20
"""More micro-steps than any kind has in a micro-batch."""


class RankedTrainer(Trainer):
    """Rank 0's trainer. It sends its operations to the followers. Only rank 0 writes checkpoints and adapters."""

    def __init__(
        self, base: Base, store: AdapterStore, folder: DataFolder, settings: TrainerSettings, *, followers: Followers
    ) -> None:
        super().__init__(base, store, folder, settings)
        self._followers = followers
        self._loads = dict[str, int]()
        """Number of each job's `LoadJob` command."""

    def load(self, spec: JobSpec, cancellation: Cancellation) -> LoadedJob:
        """See `Trainer.load`. Raises any rank's error, and `EngineFault` unless all ranks continue from the same step.
        If the load has ended and is not committed, `cancellation` frees the followers' memory."""
        answers = self._followers.ask(commands.LoadJob(spec=spec))

        def forget() -> None:
            with suppress(RankLost):  # the engine is ending anyway
                self._followers.send(commands.DropJob(answers.number))

        try:
            loaded = super().load(spec, cancellation)
            own = loaded.started.resumed_from
            for rank, step in enumerate(answers.wait(), 1):
                if step != own:
                    raise EngineFault(
                        f"job {spec.id} resumes from step {own} on rank 0, from step {step} on rank {rank}"
                    )
            cancellation.on_cancel(forget)
        except Exception:
            forget()
            raise

        def commit() -> None:
            loaded.commit()
            self._loads[spec.id] = answers.number

        return LoadedJob(loaded.started, commit)

    def advance(
        self, job: str, micro_steps: int | None, others: Sequence[str] = (), shared_tokens: int | None = None
    ) -> list[FromEngine]:
        """See `Trainer.advance`; jobs never share a batch. An error on any rank ends only the job, or restarts its
        optimizer step on all ranks with less memory or without graphs. Raises only `EngineFault`."""
        self.trained, done = (job,), 0
        while True:
            messages = self._slice(job, micro_steps or ALL_OF_A_KIND)
            done += self.micro_steps_done
            if micro_steps is not None or messages or not self.mid_batch(job):
                self.micro_steps_done = done
                return messages

    def _slice(self, job: str, micro_steps: int) -> list[FromEngine]:
        """Run micro-steps of one kind, and so of one `Verb`, on all ranks."""
        asked = list[Answers]()
        with ExitStack() as busy:

            def ready() -> None:
                asked.append(
                    busy.enter_context(self._followers.asked(commands.Advance(load=load, micro_steps=micro_steps)))
                )

            load = self._loads[job]
            own = self.attempt(job, micro_steps, ready)
            theirs = [Outcome(one.code, one.message, bool(one.value)) for answers in asked for one in answers.settle()]
        verdict = judge([own, *theirs])
        if verdict.retry:
            how = how_to_retry(verdict, graphs=self.has_graphs)
            self._followers.send(commands.AbandonJob(self._loads[job], how))
            notes = self.retry(job, how)
            if notes or not how.lower:
                return notes
        if verdict.code:
            return [JobFailed(id=job, code=verdict.code, message=verdict.message)]
        return [] if own.metrics is None else [JobProgress(id=job, metrics=own.metrics)]

    def checkpoint(self, job: str) -> Callable[[], JobCheckpoint] | None:
        """See `Trainer.checkpoint`. Raises `JobOutOfMemory` if any rank has too little memory, and `FailedTogether`."""
        with gathered(job):
            return super().checkpoint(job)

    def publication(self, job: str) -> Callable[[], Callable[[], JobSucceeded | JobWaiting]]:
        """See `Trainer.publication`. Followers read the files that rank 0 wrote; `JobWaiting` also if one of them
        cannot now. If any rank lacks host memory for its copy, none keeps one: the first request reads the files."""
        with gathered(job):
            write = super().publication(job)
        ref = self._job(job).loop.result

        def run() -> Callable[[], JobSucceeded | JobWaiting]:
            publish = write()
            if not self._folder.adapter(ref).is_dir():  # it waits for the disk
                return publish
            try:
                self._followers.ask(commands.ReadAdapter(adapter=ref, digests=None)).wait()
            except StorageError as error:
                drop()  # the copies of ranks that succeeded
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
            self._followers.send(commands.DropAdapter(ref))

        return run

    def snapshot(self, job: str) -> Callable[[], Callable[[], JobSnapshot | JobNote]]:
        """See `Trainer.snapshot`. Each rank copies its shard of the gathered weights; `JobNote` if one of them has no
        memory."""
        with gathered(job):
            own = self._begin_snapshot(job)
        answers = self._followers.ask(commands.CopySnapshot(load=self._loads[job], adapter=own.ref))

        def drop() -> None:
            self._followers.send(commands.DropAdapter(own.ref))  # on ranks that have one

        def run() -> Callable[[], JobSnapshot | JobNote]:
            try:
                try:
                    publish = own.copy()
                finally:
                    answers.settle()  # so that no copy is dropped while it is being made
                note = None
                if not all(answers.wait()):
                    note = snapshot_without_memory(job, own.step, required=own.required)
            except Exception:
                drop()
                raise

            def commit() -> JobSnapshot | JobNote:
                message = note or publish()
                if isinstance(message, JobNote):
                    drop()
                return message

            return commit

        return run

    def release_memory(self) -> bool:
        self._followers.send(commands.ReleaseMemory())
        return super().release_memory()

    def abandon(self, job: str, *, finish_update: bool = False) -> None:
        """See `Trainer.abandon`. With several ranks, an update is one slice, so a job is never suspended in one."""
        self._followers.send(commands.AbandonJob(self._loads[job]))
        super().abandon(job, finish_update=finish_update)

    def drop(self, job: str) -> None:
        self._followers.send(commands.DropJob(self._loads.pop(job)))
        super().drop(job)

    def _announce(self, job: str, verb: Verb) -> None:
        self._followers.send(commands.RunVerb(self._loads[job], verb))


@contextmanager
def gathered(job: str) -> Iterator[None]:
    """Context for operations that may gather a job's state from all ranks. Errors that all ranks share concern only the
    job; others become `EngineFault`."""
    try:
        yield
    except Exception as error:  # any kind: other ranks may wait
        if isinstance(error, FailedTogether | RankLost) or isinstance(error.__cause__, FailedTogether):
            raise
        raise EngineFault(
            f"the state of job {job} could not be gathered on rank 0, and other ranks may wait for it"
        ) from error
