"""A client's training session from its admission to its end, as a coroutine like a job's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn

from coserve.core.errors import CoserveError
from coserve.core.link.jobs import CallDone, CallFailed, CallSession
from coserve.core.training.schemas import Compute, OptimStepRequest, SaveAdapter, SaveState, SessionSpec, Step
from coserve.engine.active_job import ActiveJob
from coserve.engine.run_job import JobRun, JobServices
from coserve.finetune.sessions.client import Result, Work
from coserve.finetune.trainer import Trainer


class Calls:
    """Queue of one session's calls."""

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


class SessionRun(JobRun):
    """A client's session: starts, and executes its calls in order until it is cancelled. An error in a call ends that
    call; others end the session."""

    def __init__(self, spec: SessionSpec, services: JobServices, calls: Calls) -> None:
        super().__init__(spec, services)
        assert isinstance(services.trainer, Trainer), "expected a trainer with sessions of clients"
        self._sessions, self._calls = services.trainer, calls

    async def work(self) -> NoReturn:
        """Execute calls for ever. Raises `Stopped`, and errors that end the session."""
        while True:
            await self.execute(await self._calls.next(self))

    async def execute(self, call: CallSession) -> None:
        """Execute a call and send its answer. Raises `Stopped`, and errors that end the session."""
        try:
            result = await self._execute(call)
        except CoserveError as error:
            failed = CallFailed(id=self.id, number=call.number, code=error.code, message=str(error))
            self._services.send(failed)
        else:
            done = CallDone(id=self.id, number=call.number, values=result.values, metrics=result.metrics)
            self._services.send(done)

    async def _save(self) -> None:
        """Save nothing: the client asks for what it wants to keep."""

    async def _execute(self, call: CallSession) -> Result:
        match call.call:
            case Compute() as compute:
                try:
                    work = await self.cancellable(lambda _: self._sessions.work_of(compute))
                except CoserveError:
                    if compute.learns:
                        self._sessions.client(self.id).refused()
                    raise
                return await self._compute(work)
            case Step(adam=adam):
                return await self._compute(adam)
            case SaveState() as save:
                return await self._on_thread(self._sessions.save_state(self.id, save))
            case SaveAdapter() as save_adapter:
                return await self._on_thread(self._sessions.save_adapter(self.id, save_adapter))

    async def _compute(self, work: Work | OptimStepRequest) -> Result:
        client = self._sessions.client(self.id)
        client.begin_call(work)
        while (outcome := client.outcome) is None:
            await self.micro_batch()
        if isinstance(outcome, CoserveError):
            raise outcome
        return outcome

    async def _on_thread(self, write: Callable[[], Callable[[], None]]) -> Result:
        (await self.result(self.submit(write)))()
        return Result(b"", {})
