"""The jobs of one engine: active, queued and paused. Changes are reported over the link.

Each active job is a coroutine (`JobRun.run`), resumed before a tick decides. An error in a job's own work ends only
that job; only an `EngineFault` ends the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from coserve.admission.memory import HostAdmission
from coserve.core.link.jobs import CallSession, JobCancelled, JobFailed, JobPaused
from coserve.core.link.link import FromEngine
from coserve.core.training.jobs import JobSpec
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.schemas import SessionSpec
from coserve.core.types import AdapterRef
from coserve.engine.active_job import ActiveJob
from coserve.engine.job_memory import DeviceMemory, JobAdmission
from coserve.engine.ports import Trains
from coserve.engine.run_job import JobRun, JobServices, job_failed
from coserve.engine.run_session import Calls, SessionRun
from coserve.queues.finetune import JobQueue
from coserve.state.retries import FOR_EVER, Retries


@dataclass(frozen=True)
class JobPlaces:
    """Limits and resources for jobs. Up to `max_active` jobs have a place. They alternate; with `first_come` the oldest
    one trains, and others only while it cannot, or in micro-batches that they share with it. `threads` run their long
    work; None: two threads for each job. `memory` admits jobs: by the GPU's memory, which is read every `memory_poll`
    seconds while a job waits for it, or by host memory alone (unlimited by default)."""

    max_active: int = 1
    threads: Executor | None = None
    memory: DeviceMemory | HostAdmission = field(default_factory=HostAdmission)
    memory_poll: float = 1.0
    first_come: bool = False


class JobRunner:
    """Runs up to `max_active` jobs, alternately or one after another; further ones wait, first come, first served.
    Sessions of clients take turns with them; they wait in the same queue, but only for memory."""

    def __init__(
        self, trainer: Trains, send: Callable[[FromEngine], None], places: JobPlaces, *, changed: Callable[[], None]
    ) -> None:
        """`changed` is called, on any thread, when long work is done."""
        self._memory = JobAdmission(places.memory, trainer, send)
        self.trainer, self._send, self._max_active = trainer, send, places.max_active
        self._threads = threads = places.threads or ThreadPoolExecutor(2 * places.max_active, "jobs")
        self._starts = Retries(FOR_EVER, changed=changed)
        self._services = JobServices(trainer, self._memory, threads, self._starts, send, changed, self._pass_ended)
        self._turns = JobQueue((lambda job: [*self._active].index(job)) if places.first_come else None)
        self._active: dict[str, ActiveJob] = {}
        """Jobs with a place, including those that start or end."""
        self._pass: Future[None] | None = None
        """Done when no micro-batch is suspended any more; None: nobody waits for that."""
        self._pending = WaitingJobs(self._memory.left_queue)
        self._calls: dict[str, Calls] = {}
        """Calls of each session that waits or is active."""
        self._paused: dict[str, JobSpec] = {}
        self.slice_tokens = 0  # tokens of the last slice's micro-batch; 0: none of its jobs is left

    @property
    def troubles(self) -> tuple[str, ...]:
        """Notes on starts and publications that are being retried, and on jobs that train with less memory."""
        refused = ((job, active.trouble) for job, active in self._active.items() if active.trouble is not None)
        ends = (f"end of job {job}: {why}; it is tried again" for job, why in refused)
        return (*self._memory.troubles, *self._starts.notes, *ends, *self.trainer.notes)

    @property
    def wait_for_memory(self) -> bool:
        """Whether a queued job waits for memory."""
        return self._memory.held

    def __len__(self) -> int:
        """Number of jobs that are active or queued."""
        return len(self._active) + len(self._pending)

    def ready(self) -> tuple[str, ...]:
        """Active jobs that can train, the next one first."""
        return self._turns.ready()

    def in_training(self, job: str) -> bool:
        """Whether the job has begun to train, has neither ended nor been paused, and does not wait for samples (which
        only generation makes). It may wait for a thread."""
        active = self._active.get(job)
        if active is None or not active.loaded or active.end is not None or self.trainer.finished(job):
            return False
        return job in self._turns or not active.waits_for_samples

    def next_micro_step(self, job: str) -> MicroStep:
        """The kind of the micro-step that an active job's next slice begins with."""
        return self.trainer.next_micro_step(job)

    def micro_batch_tokens(self, job: str) -> int:
        """Tokens of an active job's current micro-batch, or of its next one as far as known; 0: unknown."""
        return self.trainer.micro_batch_tokens(job)

    def place(self, spec: JobSpec, *, paused: bool) -> None:
        """Add a job that was submitted, or that continues after a restart."""
        if paused:
            self._paused[spec.id] = spec
        else:
            self._pending.add(spec)

    def open(self, spec: SessionSpec) -> None:
        """Add a client's session."""
        self._calls[spec.id] = Calls()
        self._pending.add(spec)

    def call(self, message: CallSession) -> None:
        """Add a call of a session. Ignored if the session has ended: its client is told that."""
        if (calls := self._calls.get(message.id)) is not None:
            calls.put(message)

    def activate(self) -> None:
        """Resume each job whose micro-batch or thread is done, and start queued jobs while there are places. Call it
        before a tick decides."""
        while True:
            if self._pass is not None and not self._suspended:
                self._pass.set_result(None)
                self._pass = None
            resumed = [job for job, active in self._active.items() if active.ready]
            for job in resumed:
                self._resume(job)
            while (spec := self._pending.first(jobs=self._jobs < self._max_active)) is not None:
                if not self._admit(spec):
                    break  # later ones wait too, or a large job would starve
            for job, found in self._memory.changes():
                self._memory.limit(self._active[job], found)
            if not resumed:
                return

    @property
    def _jobs(self) -> int:
        """Number of active jobs, without sessions."""
        return len(self._active) - len(self._calls.keys() & self._active.keys())

    def _make(self, spec: JobSpec) -> ActiveJob:
        if isinstance(spec, SessionSpec):
            return SessionRun(spec, self._services, self._calls[spec.id])
        return JobRun(spec, self._services)

    def _admit(self, spec: JobSpec) -> bool:
        """Start the job, or fail it if it can never fit. Returns False if it waits for memory."""
        try:
            found = self._memory.admit(spec)
        except Exception as error:  # noqa: BLE001 - any error concerns only this job
            failed = job_failed(spec.id, error)
            self._memory.release(spec.id)
            self._pending.withdraw(spec.id)
            self._calls.pop(spec.id, None)
            self._send(failed)
            return True
        if found is not None:
            self._pending.remove(spec)
            active = self._active[spec.id] = self._make(spec)
            self._memory.limit(active, found)
            self._resume(spec.id)
        return found is not None

    def advance(self, job: str, micro_steps: int | None, shared_tokens: int | None = None) -> bool:
        """Train an active job and those that share its batch. Returns whether the micro-batch is still under way;
        otherwise its jobs have had their turn."""
        try:
            messages = self.trainer.advance(job, micro_steps, self._turns.ready(), shared_tokens)
        except Exception as error:  # noqa: BLE001 - any error concerns only this job
            self._end(job, job_failed(job, error))
            return False
        for message in messages:
            if isinstance(message, JobFailed):
                self._end(message.id, message)
            else:
                self._send(message)
        trained = [each for each in self.trainer.trained if each in self._turns]  # without failed ones
        self.slice_tokens = next((self.trainer.micro_batch_tokens(each) for each in trained), 0)
        if any(map(self.trainer.mid_batch, trained)):
            self._turns.put_first(trained)
            return True
        for each in trained:
            self._turns.rotate(each)
            turn = self._active[each].turn
            assert turn is not None, f"job {each} was given a turn that it does not wait for"
            turn.set_result(None)  # resumed later: its next work does not count as the slice's time
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
        """The samples of the job's snapshot are complete, or will not come. May be called more than once."""
        active = self._active.get(job)
        samples = None if active is None else active.samples
        if samples is not None and samples.snapshot == ref and not samples.done.done():
            samples.done.set_result(None)

    def cancel(self, job: str) -> None:
        if job in self._active:
            self._end(job, JobCancelled(id=job))
        elif self._paused.pop(job, None) is not None or self._pending.withdraw(job) is not None:
            self._calls.pop(job, None)
            self._send(JobCancelled(id=job))

    def close(self) -> None:
        """Begin no further work on threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def checkpoint(self) -> None:
        """Wait for running writes, and save all active jobs. Call it after `close`, when the engine ends."""
        for active in tuple(self._active.values()):
            active.run_to_end()
            self._retire(active)

    def _resume(self, job: str) -> None:
        """Resume the job's coroutine, and update whether the job can train."""
        active = self._active[job]
        goes_on = active.resume()
        trains = goes_on and active.turn is not None and not active.turn.done()
        if job in self._turns and not trains:
            self._turns.remove(job)
        elif job not in self._turns and trains:
            self._turns.add(job)
        if not goes_on:
            self._retire(active)

    def _end(self, job: str, end: JobPaused | JobCancelled | JobFailed) -> None:
        """End the job's training. It ends at once, or as soon as none of its files is being written."""
        self._active[job].ends(end)
        self._resume(job)

    @property
    def _suspended(self) -> bool:
        return any(map(self.trainer.mid_batch, self._turns.ready()))

    def _pass_ended(self) -> Future[None] | None:
        if self._pass is None and self._suspended:
            self._pass = Future()
        return self._pass

    def _retire(self, active: ActiveJob) -> None:
        """Free the place of a job whose coroutine has ended."""
        job, end = active.spec.id, active.end
        del self._active[job]
        self._calls.pop(job, None)
        if isinstance(end, JobPaused) and active.resumes:
            self._pending.add(active.spec)
        elif isinstance(end, JobPaused):
            self._paused[job] = active.spec
        if end is not None:
            self._send(end)


class WaitingJobs:
    """Jobs and sessions that wait for a place, first come, first served."""

    def __init__(self, withdrawn: Callable[[str], None]) -> None:
        """`withdrawn` is called with jobs that leave without a place."""
        self._withdrawn = withdrawn
        self._jobs: deque[JobSpec] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, spec: JobSpec) -> None:
        self._jobs.append(spec)

    def remove(self, spec: JobSpec) -> None:
        self._jobs.remove(spec)

    def withdraw(self, job: str) -> JobSpec | None:
        """Remove a job that ends or is paused; None if it is not queued."""
        found = next((spec for spec in self._jobs if spec.id == job), None)
        if found is not None:
            self._jobs.remove(found)
            self._withdrawn(job)
        return found

    def first(self, *, jobs: bool) -> JobSpec | None:
        """Return the next job or session; if not `jobs` (no place is free), the next session."""
        return next((spec for spec in self._jobs if jobs or isinstance(spec, SessionSpec)), None)
