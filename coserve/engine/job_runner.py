"""The jobs of one engine: active ones, one in line, paused ones. What becomes of them is told over the link.

Whatever a job's own work raises ends that job alone; only an `EngineFault` ends the engine. What may take long, however
large the job, runs on threads: a job's start, the preparation of a large optimizer step, all writing of files. Everything
else happens on the event loop, between two ticks. A job trains on while a checkpoint of it is being written; it ends, and the
end is told, only when nothing of it writes files any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from coserve.admission.memory import Start
from coserve.engine.active_job import ActiveJob, Retry
from coserve.engine.job_admission import JobAdmission
from coserve.engine.job_line import JobLine
from coserve.engine.job_threads import JobThreads, job_failed, tolerated
from coserve.engine.ports import AdmitsJobs, Trains
from coserve.errors import EngineFault, JobOutOfMemory
from coserve.link import (
    FromEngine,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobSnapshot,
    JobStarted,
    JobSucceeded,
    JobWaiting,
    TrainingBatches,
)  # fmt: skip
from coserve.queues.finetune import JobQueue
from coserve.state.retries import FOR_EVER
from coserve.types import AdapterRef, JobSpec, MicroStep

log = logging.getLogger(__name__)


class JobRunner:
    """At most `max_active` jobs take turns; further ones wait, first come, first served."""

    def __init__(
        self,
        trainer: Trains,
        send: Callable[[FromEngine], None],
        *,
        max_active: int,
        threads: Executor,
        changed: Callable[[], None],
        may_start: Callable[[JobSpec], bool] = lambda _: True,
        memory: AdmitsJobs | None = None,
    ) -> None:
        """`threads` run what may take long: two for each active job. `changed` is called, on any thread, when something of that is done.
        `may_start`: whether a job's kernels are there, asked before each tick. `memory`: admits jobs by it; None: all."""
        self._memory = JobAdmission(memory, trainer, send)
        self._trainer, self._send, self._max_active = trainer, send, max_active
        self._threads, self._changed = JobThreads(trainer, threads, changed), changed
        self._turns = JobQueue()
        self._active: dict[str, ActiveJob] = {}
        """Jobs that have a place: those that start or end, too."""
        self._unsettled: deque[str] = deque()
        """Jobs whose micro-batch has ended, or whose publication is to be tried again."""
        self._pending = JobLine(may_start, self._memory.left_line)
        self._paused: dict[str, JobSpec] = {}
        self._closed = False
        self.slice_tokens = 0  # of the last slice's micro-batch; 0: no job of it is left

    @property
    def troubles(self) -> tuple[str, ...]:
        """Starts and publications of jobs that are being tried again, and jobs that train in smaller parts."""
        retries = ((job, active.retry) for job, active in self._active.items() if active.retry is not None)
        ends = (f"end of job {job}: {retry.message}; it is tried again" for job, retry in retries)
        return (*self._pending.notes, *self._memory.troubles, *self._threads.notes, *ends, *self._trainer.notes)

    @property
    def wait_for_memory(self) -> bool:
        """Whether a job in line waits for memory."""
        return self._memory.held

    def __len__(self) -> int:
        """Jobs that are active or in line."""
        return len(self._active) + len(self._pending)

    def ready(self) -> tuple[str, ...]:
        """Active jobs that can train, the next one first."""
        return self._turns.ready()

    def in_training(self, job: str) -> bool:
        """Whether the job has begun to train, has neither ended nor been paused, and does not wait for samples, which only
        generation makes. It may wait for a thread."""
        active = self._active.get(job)
        if active is None or not active.loaded or active.end is not None or self._trainer.finished(job):
            return False
        return job in self._turns or not active.waits_for_samples

    def next_micro_step(self, job: str) -> MicroStep:
        """The kind of the micro-step that an active job's next slice begins with."""
        return self._trainer.next_micro_step(job)

    def micro_batch_tokens(self, job: str) -> int:
        """Of an active job's micro-batch under way, or of its next one, as far as known; 0: unknown."""
        return self._trainer.micro_batch_tokens(job)

    @property
    def batches(self) -> TrainingBatches:
        """Training forwards so far."""
        return self._trainer.batches

    @property
    def micro_steps_done(self) -> int:
        """Of the last slice."""
        return self._trainer.micro_steps_done

    def place(self, spec: JobSpec, *, paused: bool) -> None:
        """A job that was submitted, or goes on after a restart."""
        if paused:
            self._paused[spec.id] = spec
        else:
            self._pending.add(spec)

    def activate(self) -> None:
        """Before a tick decides: let each job whose micro-batch has ended do what comes next, start jobs in line while there are places
        for them, and take up what threads have done."""
        while True:
            while self._unsettled:
                self._settle(self._unsettled.popleft())  # first: a job that ends leaves its place to the next one
            self._start_after_pass()
            while len(self._active) < self._max_active and (spec := self._pending.first()) is not None:
                if not self._admit(spec):
                    break  # nor do later ones start: a large job would wait for ever
            for job, found in self._memory.changes():
                self._memory.limit(self._active[job], found)
            works = [job for job, each in self._active.items() if each.work is not None and each.work.future.done()]
            for job in works:
                self._collect_work(job)
            writes = [job for job, active in self._active.items() if active.write is not None and active.write.done()]
            for job in writes:
                self._collect_write(job)
            if not works and not writes:
                return

    def _admit(self, spec: JobSpec) -> bool:
        """Start the job, or end it where it never fits. False: it waits for memory."""
        try:
            found = self._memory.admit(spec)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            failed = job_failed(spec.id, error)
            self._memory.release(spec.id)
            self._pending.withdraw(spec.id)
            self._send(failed)
            return True
        if found is not None:
            self._pending.remove(spec)
            active = self._active[spec.id] = ActiveJob(spec, work=self._threads.start(spec))
            self._memory.limit(active, found)
        return found is not None

    def advance(self, job: str, micro_steps: int | None, shared_tokens: int | None = None) -> bool:
        """Train an active job, and those that share its batch. Whether it is still under way; otherwise all have had their turn."""
        try:
            messages = self._trainer.advance(job, micro_steps, self._turns.ready(), shared_tokens)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            self._fail(job, error)
            return False
        for message in messages:
            if isinstance(message, JobFailed):
                self._end(message.id, message)
            else:
                self._send(message)
        trained = [each for each in self._trainer.trained if each in self._turns]  # one that has failed is not
        self.slice_tokens = next((self._trainer.micro_batch_tokens(each) for each in trained), 0)
        if any(map(self._trainer.mid_batch, trained)):
            self._turns.put_first(trained)
            return True
        for each in trained:
            self._turns.rotate(each)
            self._unsettled.append(each)  # what comes next is no part of the slice, nor of its time
        return False

    def pause(self, job: str) -> None:
        if job in self._active:
            self._end(job, JobPaused(id=job))
        elif (waiting := self._pending.withdraw(job)) is not None:
            self._paused[job] = waiting
            self._send(JobPaused(id=job))

    def resume(self, job: str) -> None:
        if job in self._paused:
            self._pending.add(self._paused.pop(job))
        elif job in self._active:
            self._active[job].resumes = isinstance(self._active[job].end, JobPaused)

    def snapshot_done(self, job: str, ref: AdapterRef) -> None:
        """The samples of the job's snapshot are there, or will not come."""
        active = self._active.get(job)
        if active is not None and active.snapshot == ref:
            active.snapshot = None
            if job not in self._turns:
                self._settle(job)

    def cancel(self, job: str) -> None:
        if job in self._active:
            self._end(job, JobCancelled(id=job))
        elif self._paused.pop(job, None) is not None or self._pending.withdraw(job) is not None:
            self._send(JobCancelled(id=job))

    def close(self) -> None:
        """Nobody waits any more for starts and preparations, and nothing new begins."""
        self._closed = True
        for active in self._active.values():
            active.cancel_work()
            active.cancel_timer()
        self._threads.close()

    def checkpoint(self) -> None:
        """After `close`, at the end of the engine: wait for what is being written, and save all active jobs."""
        for job, active in tuple(self._active.items()):
            if active.write is not None and not active.write.cancelled():
                self._collect_write(job)
            work = active.work
            if work is not None and work.cancellation is None and not work.future.cancelled():
                self._collect_work(job)
            if job not in self._active:
                continue
            if active.loaded and not isinstance(active.end, JobCancelled | JobFailed):
                with tolerated(job):
                    if (save := self._trainer.checkpoint(job)) is not None:
                        self._send(save())
            if active.end is not None:
                self._finish(job)

    # ---- what a job does next

    def _settle(self, job: str) -> None:
        """Give a job its turns, or what it has to do before. Called where its micro-batch has ended, its thread has done
        something, or it is to end."""
        active = self._active.get(job)
        if active is None or self._closed:
            return
        if active.end is not None:
            self._unschedule(job)
            if active.cancel_work() and active.work is not None:
                active.cancelled, active.work = active.work.future, None
            if active.work is None and isinstance(active.end, JobPaused) and active.write is None:
                self._save_once(job, active)
            if active.work is None and active.write is None:
                self._finish(job)
            return
        if active.work is not None or active.timer is not None:
            return
        try:
            trains = self._threads.begin_due(job, active)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            self._fail(job, error)
            return
        if not trains:
            self._unschedule(job)
        elif job not in self._turns:
            self._turns.add(job)

    def _save_once(self, job: str, active: ActiveJob) -> None:
        """Save a job that is to pause."""
        if active.loaded and not active.saved_at_end:
            active.saved_at_end = True
            active.work = self._threads.save_at_pause(job)

    def _unschedule(self, job: str) -> None:
        if job in self._turns:
            self._turns.remove(job)

    # ---- what threads have done

    def _collect_write(self, job: str) -> None:
        """What came of a checkpoint or a snapshot that was made while the job trained."""
        active = self._active[job]
        future, active.write = active.write, None
        assert future is not None, f"job {job} writes nothing"
        try:
            message = future.result()()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            self._fail(job, error)
            return
        active.snapshot = message.ref if isinstance(message, JobSnapshot) else active.snapshot
        if message is not None:
            self._send(message)
        if job not in self._turns:  # else it trains on
            self._settle(job)

    def _collect_work(self, job: str) -> None:
        """What the job's thread came to."""
        active = self._active[job]
        work, active.work = active.work, None
        assert work is not None, f"job {job} has nothing on a thread"
        try:
            message = work.future.result()()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            starts = not (active.loaded or active.end or self._closed)
            if not (starts and isinstance(error, JobOutOfMemory) and self._starts_again(active)):
                self._fail(job, error)
            return
        finally:
            del work  # its error would keep this frame, which keeps the work: what a start has allocated would stay
        match message:
            case JobWaiting():
                self._wait(message, active)
            case JobSucceeded():
                self._retire(job)
                self._send(message)
            case None if active.end is None and not self._closed:  # it is prepared
                self._turns.add(job)
            case _:
                if isinstance(message, JobStarted):
                    active.loaded = True
                    self._memory.limit(active, Start(active.treatment))
                if message is not None:
                    self._send(message)
                self._settle(job)

    def _starts_again(self, active: ActiveJob) -> bool:
        """A start found no memory. Whether it is tried again: at once, or, a single time, after the suspended pass, which may hold some."""
        if self._trainer.release_memory():
            active.work = self._threads.start(active.spec)
        elif not active.waited_for_pass:
            active.waits_for_pass = active.waited_for_pass = self._suspended()
        return active.work is not None or active.waits_for_pass

    def _start_after_pass(self) -> None:
        for active in [active for active in self._active.values() if active.waits_for_pass]:
            if not self._suspended():
                active.waits_for_pass, active.work = False, self._threads.start(active.spec)

    def _suspended(self) -> bool:
        return any(map(self._trainer.mid_batch, self._turns.ready()))

    # ---- finished, and the disk is full

    def _wait(self, message: JobWaiting, active: ActiveJob) -> None:
        """The job keeps its place and its memory, and has no turns until the next attempt."""
        job = message.id
        if active.end is not None or self._closed:
            self._settle(job)
            return
        if active.retry is None:
            active.retry = Retry(FOR_EVER.delays(), message.message)
            log.warning("job %s: %s", job, message.message)
            self._send(message)
        delay = next(active.retry.delays)
        active.retry.timer = asyncio.get_running_loop().call_later(delay, self._attempt, job, active.retry)

    def _attempt(self, job: str, retry: Retry) -> None:
        retry.timer = None
        self._unsettled.append(job)
        self._changed()

    # ---- ends

    def _fail(self, job: str, error: Exception) -> None:
        """Report `error` as the job's end; re-raise an `EngineFault`."""
        self._end(job, job_failed(job, error))

    def _end(self, job: str, end: JobPaused | JobCancelled | JobFailed) -> None:
        """The job trains no more. It ends at once, or as soon as nothing of it writes files."""
        active = self._active[job]
        if not isinstance(active.end, JobCancelled | JobFailed):
            active.end, active.resumes = end, False
        if active.loaded:  # its activations are not kept while it waits for what it writes
            try:
                self._trainer.abandon(job, finish_update=isinstance(active.end, JobPaused))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
                failed = job_failed(job, error)
                active.end = failed if isinstance(active.end, JobPaused) else active.end
        self._settle(job)

    def _finish(self, job: str) -> None:
        """The job that is to end does so now."""
        active = self._retire(job)
        assert active.end is not None, f"job {job} goes on"
        if active.resumes:
            self._pending.add(active.spec)
        elif isinstance(active.end, JobPaused):
            self._paused[job] = active.spec
        self._send(active.end)

    def _retire(self, job: str) -> ActiveJob:
        active = self._active[job]
        self._unschedule(job)
        self._memory.release(job, active.cancelled)
        active.cancel_timer()
        if active.loaded:
            active.loaded = False
            try:
                self._trainer.drop(job)
            except EngineFault:
                raise
            except Exception:  # it is out of the trainer's books all the same
                log.exception("job %s: internal error while it was dropped", job)
        return self._active.pop(job)
