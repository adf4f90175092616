"""The jobs of one engine: active ones, one in line, paused ones. What becomes of them is told over the link."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from coserve.errors import CoserveError
from coserve.link import FromEngine, JobCancelled, JobFailed, JobPaused, JobSucceeded
from coserve.queues.finetune import JobQueue
from coserve.rooms import Trains
from coserve.types import JobSpec, Piece

log = logging.getLogger(__name__)


class Jobs:
    """At most `max_active` jobs take turns; further ones wait, first come, first served."""

    def __init__(self, trainer: Trains, send: Callable[[FromEngine], None], *, max_active: int) -> None:
        self._trainer, self._send, self._max_active = trainer, send, max_active
        self._turns = JobQueue()
        self._active: dict[str, JobSpec] = {}
        self._pending: deque[JobSpec] = deque()
        self._paused: dict[str, JobSpec] = {}

    def __len__(self) -> int:
        """Jobs that are active or in line."""
        return len(self._active) + len(self._pending)

    def ready(self) -> tuple[str, ...]:
        """Active jobs, the next one to train first."""
        return self._turns.ready()

    def mid_batch(self) -> bool:
        """Whether the next one's micro-batch is under way."""
        jobs = self.ready()
        return bool(jobs) and self._trainer.mid_batch(jobs[0])

    def next_piece(self, job: str) -> Piece:
        """The kind of the piece that an active job's next slice begins with."""
        return self._trainer.next_piece(job)

    @property
    def pieces_done(self) -> int:
        """Of the last slice."""
        return self._trainer.pieces_done

    def place(self, spec: JobSpec, *, paused: bool) -> None:
        """A job that was submitted, or goes on after a restart."""
        if paused:
            self._paused[spec.id] = spec
        else:
            self._pending.append(spec)

    def activate(self) -> None:
        """Start jobs in line while there is room for them."""
        while self._pending and len(self._active) < self._max_active:
            spec = self._pending.popleft()
            try:
                started = self._trainer.start(spec)
            except CoserveError as error:
                self._send(JobFailed(id=spec.id, code=error.code, message=error.message))
                continue
            self._active[spec.id] = spec
            self._turns.add(spec.id)
            self._send(started)

    def advance(self, job: str, pieces: int | None) -> bool:
        """Train an active job. Whether its micro-batch is still under way; otherwise the turn is the next one's."""
        # Told before the loop breathes: a pause or a cancel that comes in then must not unsay what is durable.
        for message in self._trainer.advance(job, pieces):
            self._send(message)
            if isinstance(message, JobSucceeded | JobFailed):
                self._retire(job)
        suspended = job in self._active and self._trainer.mid_batch(job)
        if job in self._active and not suspended:
            self._turns.rotate()
        return suspended

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

    def _retire(self, job: str) -> JobSpec:
        self._turns.remove(job)
        self._trainer.drop(job)
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
        try:
            saved = self._trainer.checkpoint(job)
        except CoserveError as error:
            log.warning("job %s: no checkpoint: %s", job, error.message)
            return
        if saved is not None:
            self._send(saved)
