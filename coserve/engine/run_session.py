"""A client's training session from its admission to its end, as a coroutine like `engine.run_job`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from coserve.core.errors import CoserveError
from coserve.core.training.calls import AdamParams, Compute, SaveAdapter, SaveState, Step
from coserve.core.training.messages import CallDone, CallFailed, CallSession
from coserve.engine.active_job import ActiveJob, Stopped
from coserve.engine.run_job import JobRun, JobServices, job_failed
from coserve.finetune.sessions.calls import Work
from coserve.finetune.sessions.client import Result
from coserve.finetune.trainer import Trainer


class Calls:
    """The calls of one session that wait."""

    def __init__(self) -> None:
        self._waiting = deque[CallSession]()
        self._came = Future[None]()

    def put(self, call: CallSession) -> None:
        self._waiting.append(call)
        if not self._came.done():
            self._came.set_result(None)

    async def next(self, job: ActiveJob) -> CallSession:
        """Wait for a call. Raises `Stopped`."""
        while not self._waiting:
            self._came = Future()
            await job.until(self._came)
        return self._waiting.popleft()


async def run_session(job: ActiveJob, calls: Calls, services: JobServices) -> None:
    """Load the session and execute its calls in order until it is cancelled. An error in a call ends that call; others
    end the session. Raises only `EngineFault`."""
    one = SessionRun(job, services)
    try:
        await one.start()
        while True:
            await one.execute(await calls.next(job))
    except Stopped:
        pass
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this session's alone
        job.ends(job_failed(job.spec.id, error))
    await one.stop()
    if job.end is not None:
        one.free()


class SessionRun(JobRun):
    """The stages of `run_session`."""

    def __init__(self, job: ActiveJob, services: JobServices) -> None:
        super().__init__(job, services)
        assert isinstance(services.trainer, Trainer), "expected a trainer with sessions of clients"
        self._sessions = services.trainer

    async def execute(self, call: CallSession) -> None:
        """Execute a call and send its answer. Raises `Stopped`, and errors that end the session."""
        try:
            result = await self._execute(call)
        except CoserveError as error:
            failed = CallFailed(id=self._id, number=call.number, code=error.code, message=str(error))
            self._services.send(failed)
        else:
            done = CallDone(id=self._id, number=call.number, values=result.values, metrics=result.metrics)
            self._services.send(done)

    async def stop(self) -> None:
        """Drop the call being computed; its files, if it writes some, are waited for."""
        self._job.turn = None
        if self._job.loaded:
            self._trainer.abandon(self._id)

    async def _execute(self, call: CallSession) -> Result:
        match call.call:
            case Compute() as compute:
                try:
                    work = await self.cancellable(lambda _: self._sessions.work_of(compute))
                except CoserveError:
                    if compute.learns:
                        self._sessions.client(self._id).refused()
                    raise
                return await self._compute(work)
            case Step(adam=adam):
                return await self._compute(adam)
            case SaveState() as save:
                return await self._on_thread(self._sessions.save_state(self._id, save))
            case SaveAdapter() as save_adapter:
                return await self._on_thread(self._sessions.save_adapter(self._id, save_adapter))

    async def _compute(self, work: Work | AdamParams) -> Result:
        client = self._sessions.client(self._id)
        client.begin_call(work)
        while (outcome := client.outcome) is None:
            await self.micro_batch()
        if isinstance(outcome, CoserveError):
            raise outcome
        return outcome

    async def _on_thread(self, write: Callable[[], Callable[[], None]]) -> Result:
        (await self._job.result(self.submit(write)))()
        return Result(b"", {})
