"""A running daemon as the target of a replay, through the SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from coserve.client import AsyncClient, AsyncJobHandle, RetryPolicy
from coserve.client.failures import job_error
from coserve.core import errors
from coserve.core.cancellation import cancel_all
from coserve.core.names import ADAPTER_RULE, is_adapter_name, is_adapter_ref
from coserve.core.schemas.jobs import JobEvent
from coserve.core.training.jobs import JobState
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraRequest
from coserve.workloads.gauges import Snapshot, read_snapshot
from coserve.workloads.openai_target import OpenAITarget
from coserve.workloads.replay import JobUpdate, Usage
from coserve.workloads.scenario import Scenario
from coserve.workloads.trace import FinetuneArrival, PromptArrival

T = TypeVar("T")

NO_RETRIES = RetryPolicy(attempts=1)
"""Retry policy of a replay's client: a refusal is a result, and retries would change the load."""
CLEAN_UP_ATTEMPTS = 6
SUBMISSION_WAIT = 30.0
"""Seconds that `clean_up` waits for answers to pending submissions."""
PREPARED_AT_ONCE = 64
"""Adapters created concurrently: the daemon's queue of jobs is bounded."""
SEED_ROW = {"text": "A first row, so that the adapter exists."}


class DaemonTarget:
    """Sends a trace's arrivals with `client`. Every job continues its adapter, which `prepare` creates first.

    `prefix` is put before the adapters' names on the daemon, so that a replay has its own adapters; `clean_up` deletes
    them and their jobs. `completions`: send prompts through this target, as to any OpenAI-style server.
    """

    def __init__(
        self,
        client: AsyncClient,
        scenario: Scenario,
        *,
        prefix: str = "",
        completions: OpenAITarget | None = None,
        prepared_at_once: int = PREPARED_AT_ONCE,
        submission_wait: float = SUBMISSION_WAIT,
    ) -> None:
        self._prepared_at_once, self._submission_wait = prepared_at_once, submission_wait
        self._client, self._scenario, self._prefix, self._completions = client, scenario, prefix, completions
        self._jobs: dict[str, AsyncJobHandle] = {}
        self._touched: set[str] = set()
        self._submissions: dict[asyncio.Task[AsyncJobHandle], str] = {}
        """Pending submissions with their adapter's name. A caller that is cancelled leaves its submission to
        `clean_up`."""
        self._unsure: set[str] = set()
        """Adapters of jobs that may still exist on the daemon."""

    @property
    def made(self) -> list[str]:
        """Return the names of the adapters that `prepare` created or began to create."""
        return sorted(self._touched)

    def served_name(self, adapter: str) -> str:
        return self._prefix + adapter

    async def prepare(self, names: Iterable[str] = ()) -> int:
        """Create the adapters of the scenario and of `names` that the daemon lacks; return their number.

        Raises the client's `CoserveError`, and `InvalidRequest` for an existing adapter of another LoRA rank or
        a name that is invalid with the prefix.
        """
        ranks = {name: self._scenario.rank_of(i) for i, name in enumerate(self._scenario.adapter_names)}
        ranks |= {name: self._scenario.rank_of(i) for i, name in enumerate(names) if name not in ranks}
        usable = is_adapter_name if self._prefix else is_adapter_ref  # an adapter version can be used, but not created
        for name in map(self.served_name, ranks):
            if not usable(name):
                raise errors.InvalidRequest(f"expected {ADAPTER_RULE}, got {name[:80]!r}", field="prefix")
        limit = asyncio.Semaphore(self._prepared_at_once)

        async def ensure(name: str, rank: int) -> bool:
            async with limit:
                return await self._ensure(self.served_name(name), rank)

        tasks = [asyncio.ensure_future(ensure(name, rank)) for name, rank in ranks.items()]
        try:
            return sum(await asyncio.gather(*tasks))
        finally:  # after a failure the others are cancelled too: none may be created during `clean_up`
            await cancel_all(tasks)

    async def _ensure(self, name: str, rank: int) -> bool:
        try:
            adapter = await self._client.adapter(name)
        except errors.AdapterNotFound:
            if not is_adapter_name(name):
                raise
            settings = LoraRequest(r=rank, targets=self._scenario.targets or None)
            self._touched.add(name)
            training = TrainingSettings(steps=1)
            job = await self._submitted(name, self._client.finetune(name, [SEED_ROW], lora=settings, training=training))
            await job.wait(progress=False)
            return True
        if adapter.rank != rank:
            raise errors.InvalidRequest(f"expected {name} to be of rank {rank}, got {adapter.rank}")
        return False

    async def generate(self, arrival: PromptArrival) -> AsyncIterator[int | Usage]:
        if self._completions is not None:
            async for new in self._completions.generate(arrival):
                yield new
            return
        chunks = self._client.stream(
            arrival.prompt,
            slo_class=arrival.slo_class,
            adapter=None if arrival.adapter is None else self.served_name(arrival.adapter),
            max_tokens=arrival.max_tokens,
            temperature=self._scenario.temperature,
            seed=arrival.seed,
            ignore_eos=True,
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                yield len(chunk.token_ids)
                if chunk.usage is not None:
                    yield Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.finish_reason)

    async def probe(self, at: float) -> Snapshot:
        """Return the gauges of `/metrics`."""
        return read_snapshot(await self._client.metrics(), at)

    async def submit(self, arrival: FinetuneArrival) -> str:
        return (await self._submitted(self.served_name(arrival.adapter), self.start(arrival))).id

    async def _submitted(self, name: str, submission: Coroutine[Any, Any, AsyncJobHandle]) -> AsyncJobHandle:
        """Return the job of a submission. If the caller is cancelled, the submission continues, since the daemon may
        already have accepted it."""
        task = asyncio.ensure_future(submission)
        self._submissions[task] = name
        task.add_done_callback(self._answered)
        return await asyncio.shield(task)

    def _answered(self, task: asyncio.Task[AsyncJobHandle]) -> None:
        name = self._submissions.pop(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or (isinstance(error, errors.Unreachable) and error.sent):
            self._unsure.add(name)
        elif error is None:
            job = task.result()
            self._jobs[job.id] = job

    async def start(self, arrival: FinetuneArrival) -> AsyncJobHandle:
        name, training = self.served_name(arrival.adapter), self._scenario.training
        return await self._client.finetune(
            name, arrival.rows, continue_from=name, training=training, on_conflict="fork"
        )

    async def watch(self, job: str) -> AsyncIterator[JobUpdate]:
        events = self._jobs[job].events()
        async with aclosing(events):
            async for event in events:
                self.seen(event)
                yield JobUpdate(tokens=0 if event.metrics is None else event.metrics.tokens, state=event.state)
                if event.state in (JobState.PAUSED, JobState.FAILED):
                    ended = await self._jobs[job].refresh()
                    if ended.state in (JobState.PAUSED, JobState.FAILED):
                        raise errors.JobError("the job was paused") if ended.error is None else job_error(ended.error)

    def seen(self, event: JobEvent) -> None:
        """Called with each event of a job; override it to show progress."""

    async def cancel(self, job: str) -> None:
        await self._jobs[job].cancel()

    async def clean_up(self) -> list[str]:
        """Cancel this target's running jobs, and delete the adapters that `prepare` created, and their jobs. Return the
        names of adapters that could not be deleted, or whose job may still run."""
        if self._submissions:
            _, late = await asyncio.wait(set(self._submissions), timeout=self._submission_wait)
            await cancel_all(late)
        limit = asyncio.Semaphore(self._prepared_at_once)
        await asyncio.gather(*(self._end(job, limit) for job in self._jobs.values()))
        gone = await asyncio.gather(*(self._delete(name, limit) for name in self.made))
        kept = {name for name, deleted in zip(self.made, gone, strict=True) if not deleted}
        useless = (job for job in self._jobs.values() if job.info.adapter in self._touched - kept - self._unsure)
        await asyncio.gather(*(self._forget(job, limit) for job in useless))
        return sorted(kept | (self._unsure & self._touched))

    async def _end(self, job: AsyncJobHandle, limit: asyncio.Semaphore) -> None:
        try:
            ended = (await _patiently(job.cancel, limit)).state.terminal
        except errors.CoserveError as error:
            ended = isinstance(error, errors.WrongJobState | errors.JobNotFound)
        if not ended:
            self._unsure.add(job.info.adapter)

    async def _forget(self, job: AsyncJobHandle, limit: asyncio.Semaphore) -> None:
        with suppress(errors.CoserveError):  # it takes no room but a line of the list
            await _patiently(job.delete, limit)

    async def _delete(self, name: str, limit: asyncio.Semaphore) -> bool:
        try:
            await _patiently(lambda: self._client.delete_adapter(name), limit)
        except errors.AdapterNotFound:  # its first job never ended
            return True
        except errors.CoserveError:
            return False
        return True


async def _patiently(call: Callable[[], Awaitable[T]], limit: asyncio.Semaphore) -> T:
    """Make a call of a clean-up; retry while the adapter or the daemon is busy. `limit` bounds concurrent calls."""
    async with limit:
        for attempt in range(CLEAN_UP_ATTEMPTS - 1):
            try:
                return await call()
            except errors.CoserveError as error:
                if not _passes(error):
                    raise
            await asyncio.sleep(0.1 * 2**attempt)
        return await call()


def _passes(error: errors.CoserveError) -> bool:
    """Return whether the call may succeed soon; False if no daemon listens."""
    if isinstance(error, errors.Unreachable):
        return error.sent
    return isinstance(error, errors.AdapterBusy) or error.status in (429, 503)
