"""The jobs of one engine: active ones, one in line, paused ones. What becomes of them is told over the link.

Whatever a job's own work raises ends that job alone; only an `EngineFault` ends the engine. What may take long, however
large the job, runs on threads: a job starts there, and goes back there between two optimizer steps where the next one has
much to prepare. Everything else happens on the event loop, between two ticks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

from coserve.cancellation import Cancellation
from coserve.engine.ports import Trains
from coserve.errors import CoserveError, EngineFault, failure_text
from coserve.link import FromEngine, JobCancelled, JobFailed, JobPaused, JobStarted, JobSucceeded, JobWaiting
from coserve.queues.finetune import JobQueue
from coserve.state.retries import FOR_EVER, Retries
from coserve.types import JobSpec, MicroStep

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Background:
    """Work of a job on a thread, whose result is a call to be made on the event loop."""

    cancellation: Cancellation
    future: Future[Callable[[], JobStarted | None]]


@dataclass
class _Wait:
    """A finished job until the disk takes its files: `delays` in seconds, `timer` of the next attempt."""

    delays: Iterator[float]
    message: str
    timer: asyncio.TimerHandle | None = None


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
    ) -> None:
        """`threads` run what may take long; `changed` is called, on any thread, when something of that is done."""
        self._trainer, self._send, self._max_active = trainer, send, max_active
        self._threads, self._changed = threads, changed
        self._turns = JobQueue()
        self._active: dict[str, JobSpec] = {}
        """Jobs that have a place: those that start, too."""
        self._background: dict[str, _Background] = {}
        """Active ones that have no turn now."""
        self._waiting: dict[str, _Wait] = {}
        """Finished jobs whose publication is being retried."""
        self._started: set[str] = set()
        """Active ones that the trainer has in memory."""
        self._pending: deque[JobSpec] = deque()
        self._paused: dict[str, JobSpec] = {}
        self._retries = Retries(FOR_EVER, changed=changed)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Starts and publications of jobs that are being tried again, and jobs that train in smaller parts."""
        waiting = (f"end of job {job}: {wait.message}; it is tried again" for job, wait in self._waiting.items())
        return (*self._retries.notes, *waiting, *self._trainer.notes)

    def __len__(self) -> int:
        """Jobs that are active or in line."""
        return len(self._active) + len(self._pending)

    def ready(self) -> tuple[str, ...]:
        """Active jobs that can train, the next one first."""
        return self._turns.ready()

    def mid_batch(self) -> bool:
        """Whether the next one's micro-batch is under way."""
        jobs = self.ready()
        return bool(jobs) and self._trainer.mid_batch(jobs[0])

    def next_micro_step(self, job: str) -> MicroStep:
        """The kind of the micro-step that an active job's next slice begins with."""
        return self._trainer.next_micro_step(job)

    @property
    def micro_steps_done(self) -> int:
        """Of the last slice."""
        return self._trainer.micro_steps_done

    def place(self, spec: JobSpec, *, paused: bool) -> None:
        """A job that was submitted, or goes on after a restart."""
        if paused:
            self._paused[spec.id] = spec
        else:
            self._pending.append(spec)

    def activate(self) -> None:
        """Start jobs in line while there is room for them; give turns to those that are done on their threads."""
        while True:
            while self._pending and len(self._active) < self._max_active:
                spec = self._pending.popleft()
                self._active[spec.id] = spec
                self._start(spec)
            done = [job for job, work in self._background.items() if work.future.done()]
            for job in done:
                self._take_up(job)
            if not done:
                return

    def advance(self, job: str, micro_steps: int | None) -> bool:
        """Train an active job. Whether its micro-batch is still under way; otherwise the turn is the next one's."""
        try:
            messages = self._trainer.advance(job, micro_steps)
            suspended = self._trainer.mid_batch(job)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            self._fail(job, error)
            return False
        # Told before the loop breathes: a pause or a cancel that comes in then must not unsay what is durable.
        for message in messages:
            if isinstance(message, JobWaiting):
                self._wait(message)
                continue
            self._send(message)
            if isinstance(message, JobSucceeded | JobFailed):
                self._retire(job)
        if job not in self._turns or suspended:
            return suspended
        self._turns.rotate()
        self._prepare(job)
        return False

    def pause(self, job: str) -> None:
        if job in self._active:
            self._save(job)
            spec = self._retire(job)
        elif (waiting := self._withdraw(job)) is not None:
            spec = waiting
        else:
            return
        self._paused[job] = spec
        self._send(JobPaused(id=job))

    def resume(self, job: str) -> None:
        if job in self._paused:
            self._pending.append(self._paused.pop(job))

    def cancel(self, job: str) -> None:
        if job in self._active:
            self._retire(job)
        elif self._paused.pop(job, None) is None and self._withdraw(job) is None:
            return
        self._send(JobCancelled(id=job))

    def checkpoint(self) -> None:
        """Of all active jobs: the end is near."""
        for job in tuple(self._active):
            self._save(job)

    def close(self) -> None:
        """Nobody waits any more for what runs on threads."""
        for work in self._background.values():
            work.cancellation.cancel()
        for wait in self._waiting.values():
            if wait.timer is not None:
                wait.timer.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- finished, and the disk is full

    def _wait(self, message: JobWaiting) -> None:
        """The job keeps its place and its memory, and loses its turns until the next attempt."""
        job = message.id
        self._turns.remove(job)
        wait = self._waiting.get(job)
        if wait is None:
            wait = self._waiting[job] = _Wait(FOR_EVER.delays(), message.message)
            log.warning("job %s: %s", job, message.message)
            self._send(message)
        wait.timer = asyncio.get_running_loop().call_later(next(wait.delays), self._attempt, job)

    def _attempt(self, job: str) -> None:
        self._turns.add(job)
        self._changed()

    # ---- on threads

    def _start(self, spec: JobSpec) -> None:
        cancellation = Cancellation()
        load = partial(self._trainer.load, spec, cancellation)
        what = f"start of job {spec.id}"
        self._leave(spec.id, cancellation, lambda: self._retries.run_here(what, load, cancellation.wait))

    def _prepare(self, job: str) -> None:
        """The job loses its turn for as long as its next optimizer step takes to prepare."""
        try:
            preparation = self._trainer.preparation(job)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            self._fail(job, error)
            return
        if preparation is None:
            return
        cancellation = Cancellation()

        def prepare() -> Callable[[], None]:
            preparation(cancellation)
            return lambda: None

        self._turns.remove(job)
        self._leave(job, cancellation, prepare)

    def _leave(self, job: str, cancellation: Cancellation, work: Callable[[], Callable[[], JobStarted | None]]) -> None:
        future = self._threads.submit(work)
        self._background[job] = _Background(cancellation, future)
        if not future.done():  # else it is taken up in this turn, or the next
            future.add_done_callback(lambda _: self._changed())

    def _take_up(self, job: str) -> None:
        """What the job's thread came to."""
        try:
            started = self._background.pop(job).future.result()()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's alone
            self._fail(job, error)
            return
        self._turns.add(job)
        if started is not None:
            self._started.add(job)
            self._send(started)

    # ---- ends

    def _fail(self, job: str, error: Exception) -> None:
        """Report `error` as the job's end; re-raise an `EngineFault`."""
        if isinstance(error, EngineFault):
            raise error
        if not isinstance(error, CoserveError):
            log.error("job %s: internal error", job, exc_info=error)
        code, message = failure_text(error)
        self._retire(job)
        self._send(JobFailed(id=job, code=code, message=message))

    def _retire(self, job: str) -> JobSpec:
        if job in self._turns:
            self._turns.remove(job)
        if (work := self._background.pop(job, None)) is not None:
            work.cancellation.cancel()
        if (wait := self._waiting.pop(job, None)) is not None and wait.timer is not None:
            wait.timer.cancel()
        if job in self._started:
            self._started.remove(job)
            try:
                self._trainer.drop(job)
            except EngineFault:
                raise
            except Exception:  # it is out of the trainer's books all the same
                log.exception("job %s: internal error while it was dropped", job)
        return self._active.pop(job)

    def _withdraw(self, job: str) -> JobSpec | None:
        """Take a waiting job out of the line."""
        for spec in self._pending:
            if spec.id == job:
                self._pending.remove(spec)
                return spec
        return None

    def _save(self, job: str) -> None:
        """A checkpoint at a pause or at the end; one that fails costs the steps since the last, never the job."""
        if job not in self._started:
            return
        try:
            saved = self._trainer.checkpoint(job)
        except EngineFault:
            raise
        except CoserveError as error:
            log.warning("job %s: no checkpoint: %s", job, error.message)
        except Exception:
            log.exception("job %s: internal error; no checkpoint", job)
        else:
            if saved is not None:
                self._send(saved)
