"""The work of jobs on threads. Each method starts some work; the event loop collects the future's result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from coserve.cancellation import Cancellation
from coserve.engine.active_job import ActiveJob, Commit, ThreadWork
from coserve.engine.ports import Trains
from coserve.errors import CapacityError, CoserveError, EngineFault, failure_text
from coserve.link import JobCheckpoint, JobFailed
from coserve.state.retries import FOR_EVER, Retries
from coserve.types import JobSpec

log = logging.getLogger(__name__)

T = TypeVar("T")


class JobThreads:
    """The threads of all jobs, two for each active one."""

    def __init__(self, trainer: Trains, executor: Executor, changed: Callable[[], None]) -> None:
        """`changed` is called on any thread when some work is done."""
        self._trainer, self._executor, self._changed = trainer, executor, changed
        self._retries = Retries(FOR_EVER, changed=changed)

    @property
    def notes(self) -> tuple[str, ...]:
        """Starts that are being retried."""
        return self._retries.notes

    def start(self, spec: JobSpec) -> ThreadWork:
        """Load a job."""
        cancellation = Cancellation()
        load, what = partial(self._trainer.load, spec, cancellation), f"start of job {spec.id}"
        return self._work(partial(self._retries.run_blocking, what, load, cancellation.wait), cancellation)

    def prepare(self, preparation: Callable[[Cancellation], None]) -> ThreadWork:
        """Prepare an optimizer step."""
        cancellation = Cancellation()

        def work() -> Commit:
            preparation(cancellation)
            return lambda: None

        return self._work(work, cancellation)

    def publish(self, job: str) -> ThreadWork:
        """Publish a finished job."""
        return self._work(self._trainer.publication(job), None)

    def snapshot(self, job: str) -> Future[Commit]:
        """Copy the adapter as it is now, for samples."""
        return self._submit(self._trainer.snapshot(job))

    def write(self, job: str) -> Future[Commit] | None:
        """Write a checkpoint; on a full disk it is skipped. None if there is nothing to write."""
        save = self._trainer.checkpoint(job)
        if save is None:
            return None

        def work() -> Commit:
            saved: JobCheckpoint | None = None
            try:
                saved = save()
            except CapacityError as error:
                log.warning("job %s: no checkpoint: %s", job, error.message)
            return lambda: saved

        return self._submit(work)

    def save_at_pause(self, job: str) -> ThreadWork | None:
        """Write the state of a job that is pausing. None if there is nothing to write."""
        save: Callable[[], JobCheckpoint] | None = None
        with tolerated(job):
            save = self._trainer.checkpoint(job)
        if save is None:
            return None

        def work() -> Commit:
            saved: JobCheckpoint | None = None
            with tolerated(job):
                saved = save()
            return lambda: saved

        return self._work(work, None)

    def begin_due(self, job: str, active: ActiveJob) -> bool:
        """Begin what is due between two micro-batches. False: the job has no turns until that is done."""
        if self._trainer.snapshot_due(job):
            if active.write is not None or active.snapshot is not None:
                return False
            active.write = self.snapshot(job)
        if self._trainer.finished(job):
            if active.write is None and active.snapshot is None:
                active.work = self.publish(job)
            return False
        if self._trainer.checkpoint_due(job):
            if active.write is not None:
                return False
            active.write = self.write(job)
        preparation = self._trainer.preparation(job)
        if preparation is not None:
            active.work = self.prepare(preparation)
        return preparation is None

    def close(self) -> None:
        """Start no more work, and do not wait for running work."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _work(self, work: Callable[[], Commit], cancellation: Cancellation | None) -> ThreadWork:
        return ThreadWork(self._submit(work), cancellation)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        future = self._executor.submit(work)
        if not future.done():  # else it is collected in this tick or the next
            future.add_done_callback(lambda _: self._changed())
        return future


@contextmanager
def tolerated(job: str) -> Iterator[None]:
    """For a checkpoint at a pause or at the engine's end: if it fails, the steps since the last one are lost, not the job."""
    try:
        yield
    except EngineFault:
        raise
    except CoserveError as error:
        log.warning("job %s: no checkpoint: %s", job, error.message)
    except Exception:
        log.exception("job %s: internal error; no checkpoint", job)


def job_failed(job: str, error: Exception) -> JobFailed:
    """The message of a job that `error` ends. Re-raises an `EngineFault`."""
    if isinstance(error, EngineFault):
        raise error
    if not isinstance(error, CoserveError):
        log.error("job %s: internal error", job, exc_info=error)
    code, message = failure_text(error)
    return JobFailed(id=job, code=code, message=message)
