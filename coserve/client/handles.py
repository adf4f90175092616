"""A fine-tuning job as an object: follow, wait, pause, resume, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from coserve.client.caller import Caller, decode
from coserve.client.failures import job_error
from coserve.client.progress import progress_for
from coserve.core.errors import CapacityError, CoserveError, Unreachable
from coserve.core.schemas.jobs import DeletedJob, Job, JobEvent
from coserve.core.training.jobs import JobState


class AsyncJobHandle:
    """A handle to one job. `info` is its latest known state; every method that asks the daemon updates it."""

    def __init__(self, caller: Caller, info: Job) -> None:
        self._caller = caller
        self.info = info

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.info.adapter}@{self.info.version} {self.info.state}>"

    @property
    def id(self) -> str:
        return self.info.id

    async def refresh(self) -> Job:
        """Return the job's current state."""
        return await self._ask("GET", "")

    async def pause(self) -> Job:
        """Pause the job at a checkpoint, until `resume`. Raises `WrongJobState`."""
        return await self._ask("POST", "/pause")

    async def resume(self) -> Job:
        """Queue a paused job again. Raises `WrongJobState`."""
        return await self._ask("POST", "/resume")

    async def cancel(self) -> Job:
        """Cancel the job; it leaves no adapter. Raises `WrongJobState`."""
        return await self._ask("POST", "/cancel")

    async def delete(self) -> DeletedJob:
        """Delete a job that has ended, and its events; its adapter stays. Raises `WrongJobState`."""
        return await self._caller.call("DELETE", f"/finetune/{self.id}", DeletedJob)

    async def _ask(self, method: str, suffix: str) -> Job:
        self.info = await self._caller.call(method, f"/finetune/{self.id}{suffix}", Job)
        return self.info

    async def events(self, after: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Yield the job's events after `after`, live until its end; each event once, across reconnects.

        Raises `Unreachable` or `EngineUnavailable` if the daemon does not come back.
        """
        failures = 0
        while True:
            error: CoserveError = Unreachable("the daemon ended the events before the job's end", sent=True)
            try:
                async with aclosing(self._events_once(after)) as events:
                    async for event in events:
                        after, failures = event.seq, 0
                        yield event
                        if event.state is not None and event.state.terminal:
                            return
                if (await self.refresh()).state.terminal:
                    return  # the caller already has the job's last event
            except CapacityError as refused:
                if refused.status not in (429, 503):
                    raise
                error = refused
            failures += 1
            if failures > self._caller.retry.reconnects:
                raise error
            await self._caller.back_off(failures, error)

    async def _events_once(self, after: int) -> AsyncGenerator[JobEvent, None]:
        """Yield the events of one connection."""
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        request = self._caller.request("GET", f"/finetune/{self.id}/events", headers=headers)
        async with aclosing(self._caller.events(request, again=False)) as events:
            async for event in events:
                yield decode(event.data, JobEvent)

    async def wait(
        self,
        *,
        progress: bool | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as in every SDK
        check: bool = True,
    ) -> Job:
        """Wait until the job ends or the daemon pauses it; a job that a user paused is still waited for.

        `progress`: show a progress bar on standard error; None: a bar on a terminal, else lines with samples and
        progress. Raises `TimeoutError` after `timeout` seconds and, if `check`, the error that made the job fail
        (`NonFiniteLoss`, `JobOutOfMemory`, ...) or that paused it (`EngineCrashed`).
        """
        try:
            async with asyncio.timeout(timeout):
                await self._follow(progress)
        except TimeoutError:
            raise TimeoutError(f"job {self.id} had not ended after {timeout} s; it goes on") from None
        if check and self.info.error is not None:
            raise job_error(self.info.error)
        return self.info

    async def _follow(self, progress: bool | None) -> None:
        with progress_for(self.info, progress) as bar:
            async with aclosing(self.events()) as events:
                async for event in events:
                    bar.show(event)
                    if event.state is JobState.PAUSED and await self._paused_by_error():
                        break
                else:
                    await self.refresh()

    async def _paused_by_error(self) -> bool:
        """Return whether the daemon has paused the job and it is still paused."""
        info = await self.refresh()
        return info.state is JobState.PAUSED and info.error is not None
