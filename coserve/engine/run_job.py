"""One job from start to end, as a coroutine: see `JobRun.run`.

It suspends for two things: a micro-batch, which the policy runs slice by slice (`ActiveJob.turn`), and work on a
thread. Starts, the preparation of large optimizer steps and all file writes run on threads; everything else happens on
the event loop, between two ticks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from coserve.admission.memory import Start
from coserve.core.cancellation import Cancellation
from coserve.core.errors import CapacityError, CoserveError, EngineFault, JobOutOfMemory, failure_text
from coserve.core.link.jobs import JobCheckpoint, JobFailed, JobPaused, JobSnapshot, JobStarted, JobSucceeded
from coserve.core.link.link import FromEngine
from coserve.core.training.jobs import JobSpec
from coserve.engine.active_job import ActiveJob, Samples, Stopped
from coserve.engine.job_memory import JobAdmission
from coserve.engine.ports import Trains
from coserve.state.retries import FOR_EVER, Retries

log = logging.getLogger(__name__)

T = TypeVar("T")
Commit = Callable[[], FromEngine | None]
"""The result of a thread's work. Calling it on the event loop commits the work and returns the message to send."""


@dataclass(frozen=True)
class JobServices:
    """Services shared by the coroutines of an engine's jobs."""

    trainer: Trains
    memory: JobAdmission
    threads: Executor
    starts: Retries
    """Retries starts that the disk refuses."""
    send: Callable[[FromEngine], None]
    changed: Callable[[], None]
    """Wakes the engine; called on any thread."""
    pass_ended: Callable[[], Future[None] | None]
    """Returns a future that is done when the suspended micro-batch has ended; None: none is suspended."""


class JobRun(ActiveJob):
    """A job: starts, trains and publishes. It trains on while its checkpoints are written, and ends only when none of
    its files is being written."""

    def __init__(self, spec: JobSpec, services: JobServices) -> None:
        super().__init__(spec)
        self._services, self._trainer = services, services.trainer
        self._write: Future[Commit] | None = None
        """A checkpoint being written, or a snapshot being copied, while the job trains."""
        self._cancelled: Future[Any] | None = None
        """Cancelled work that may hold memory until its thread has ended."""

    async def run(self) -> None:
        """Start the job, train it, publish its adapter; set `end`. Errors in its own work end only this job.

        A pause, and the engine's end, first save its last finished optimizer step.
        """
        try:
            await self.start()
            self.end = await self.work()
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - any error concerns only this job
            self.ends(job_failed(self.id, error))
        if not isinstance(self.end, JobSucceeded):
            await self.stop()
        if self.end is not None:
            self.free()

    async def work(self) -> JobSucceeded:
        """Do everything between the start and the end."""
        await self.train()
        return await self.publish()

    async def start(self) -> None:
        """Load the job. A start that runs out of memory is retried: at once if some could be freed; otherwise once,
        after the suspended micro-batch has ended, which may hold memory."""
        waited = False
        while True:
            try:
                started = (await self.cancellable(self._load))()
                break
            except JobOutOfMemory:
                suspended = None
                if not self._trainer.release_memory():
                    suspended = self._services.pass_ended()
                    if waited or suspended is None:
                        raise
            if suspended is not None:
                waited = True
                await self.until(suspended)
        self.loaded = True
        self._services.memory.limit(self, Start(self.recompute_plan))
        self._services.send(started)

    def _load(self, cancellation: Cancellation) -> Callable[[], JobStarted]:
        load = partial(self._trainer.load, self.spec, cancellation)
        return self._services.starts.run_blocking(f"start of job {self.id}", load, cancellation.wait)

    async def train(self) -> None:
        """Run micro-batches, and the work due between them, until only the publication is left."""
        while True:
            if self._trainer.snapshot_due(self.id):
                await self._written_and_sampled()
                self._write = self.submit(self._trainer.snapshot(self.id))
            if self._trainer.finished(self.id):
                await self._written_and_sampled()
                return
            if self._trainer.checkpoint_due(self.id):
                await self._written()
                self._write = self._begin_checkpoint()
            if (prepare := self._trainer.preparation(self.id)) is not None:
                await self.cancellable(prepare)
            await self.micro_batch()

    async def publish(self) -> JobSucceeded:
        """Publish the finished job. If the disk refuses, the job keeps its place and its memory, and retries."""
        for delay in FOR_EVER.delays():
            message = (await self.result(self.submit(self._trainer.publication(self.id))))()
            if isinstance(message, JobSucceeded):
                return message
            if self.stops:
                break
            if self.trouble is None:
                self.trouble = message.message
                log.warning("job %s: %s", self.id, message.message)
                self._services.send(message)
            await self._sleep(delay)
        raise Stopped

    async def stop(self) -> None:
        """Wait for running writes, and save a job that will continue later. Its activations are freed first."""
        self.turn = None
        if self.loaded and self.end is not None:
            try:
                self._trainer.abandon(self.id, finish_update=isinstance(self.end, JobPaused))
            except Exception as error:  # noqa: BLE001 - any error concerns only this job
                failed = job_failed(self.id, error)
                self.end = failed if isinstance(self.end, JobPaused) else self.end
        while self._write is not None:
            try:
                message = (await self.result(self._take_write()))()
                if message is not None:
                    self._services.send(message)
            except Stopped:  # it had not begun
                pass
            except Exception as error:  # noqa: BLE001 - any error concerns only this job
                self.ends(job_failed(self.id, error))
        if self.loaded and (self.end is None or isinstance(self.end, JobPaused)):
            await self._save()

    def free(self) -> None:
        """Free the job's memory."""
        self._services.memory.release(self.id, self._cancelled)
        if not self.loaded:
            return
        self.loaded = False
        try:
            self._trainer.drop(self.id)
        except EngineFault:
            raise
        except Exception:  # the trainer has removed it anyway
            log.exception("job %s: internal error while it was dropped", self.id)

    async def _save(self) -> None:
        """Save a checkpoint. If this fails, the steps since the last one are lost, but not the job."""
        with tolerated(self.id):
            if (save := self._trainer.checkpoint(self.id)) is not None:
                self._services.send(save() if self.closing else await self.result(self.submit(save)))

    async def micro_batch(self) -> None:
        """Wait for the end of a micro-batch, and meanwhile process a finished write."""
        turn = self.turn = Future()
        while not turn.done():
            await self.until(turn, *(() if self._write is None else (self._write,)))
            if self._write is not None and self._write.done():
                await self._written()

    async def _written(self) -> None:
        """Wait for the running write, if any, and send its message."""
        if self._write is None:
            return
        await self.until(self._write)
        message = (await self.result(self._take_write()))()
        if isinstance(message, JobSnapshot):
            self.samples = Samples(message.ref)
        if message is not None:
            self._services.send(message)

    async def _written_and_sampled(self) -> None:
        await self._written()
        if self.samples is not None:
            await self.until(self.samples.done)
            self.samples = None

    def _take_write(self) -> Future[Commit]:
        write, self._write = self._write, None
        assert write is not None, f"job {self.id} writes nothing"
        return write

    def _begin_checkpoint(self) -> Future[Commit] | None:
        """Begin a checkpoint; on a full disk it is skipped. None if there is nothing to write."""
        save = self._trainer.checkpoint(self.id)
        if save is None:
            return None

        def work() -> Commit:
            saved: JobCheckpoint | None = None
            try:
                saved = save()
            except CapacityError as error:
                log.warning("job %s: no checkpoint: %s", self.id, error.message)
            return lambda: saved

        return self.submit(work)

    async def cancellable(self, work: Callable[[Cancellation], T]) -> T:
        """Return the result of work on a thread that writes no files. If the job stops, the work is cancelled and not
        waited for."""
        cancellation = Cancellation()
        future = self.submit(partial(work, cancellation))
        try:
            await self.until(future)
            return await self.result(future)
        except Stopped:
            cancellation.cancel()
            self._cancelled = future
            raise
        finally:
            del future  # breaks the cycle of this frame and the error's traceback

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future = self._services.threads.submit(work)
        if not future.done():
            future.add_done_callback(lambda _: self._services.changed())
        return future

    async def _sleep(self, seconds: float) -> None:
        slept = Future[None]()

        def wake() -> None:
            slept.set_result(None)
            self._services.changed()

        timer = asyncio.get_running_loop().call_later(seconds, wake)
        try:
            await self.until(slept)
        finally:
            timer.cancel()


@contextmanager
def tolerated(job: str) -> Iterator[None]:
    """Context for a checkpoint at a pause or at the engine's end: if it fails, the steps since the last one are lost,
    but not the job."""
    try:
        yield
    except EngineFault:
        raise
    except CoserveError as error:
        log.warning("job %s: no checkpoint: %s", job, error.message)
    except Exception:  # our own fault in one job: it goes on without this checkpoint
        log.exception("job %s: internal error; no checkpoint", job)


def job_failed(job: str, error: Exception) -> JobFailed:
    """The message of a job that ends with `error`. Re-raises an `EngineFault`."""
    if isinstance(error, EngineFault):
        raise error
    if not isinstance(error, CoserveError):
        log.error("job %s: internal error", job, exc_info=error)
    code, message = failure_text(error)
    return JobFailed(id=job, code=code, message=message)
