"""A running daemon as the target of a replay, through the SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

from coserve.client import AsyncClient, AsyncJobHandle, RetryPolicy
from coserve.errors import AdapterBusy, AdapterNotFound, CoserveError, InvalidRequest
from coserve.schemas import JobEvent
from coserve.types import LoraSettings, TrainingSettings
from coserve.workloads.replay import JobUpdate
from coserve.workloads.scenario import FinetuneArrival, PromptArrival, Scenario

NO_RETRIES = RetryPolicy(attempts=1)
"""For the client of a replay: a refusal is a result, and retries would change the load."""
DELETE_ATTEMPTS = 6
SEED_ROW = {"text": "A first row, so that the adapter exists."}


class DaemonTarget:
    """Sends a trace's arrivals with `client`; every job continues its adapter, which `prepare` makes first.

    `prefix` of the adapters' names on the daemon, so that a replay has adapters of its own; `clean_up` deletes them.
    """

    def __init__(self, client: AsyncClient, scenario: Scenario, *, prefix: str = "") -> None:
        self._client, self._scenario, self._prefix = client, scenario, prefix
        self._jobs: dict[str, AsyncJobHandle] = {}
        self._touched: set[str] = set()

    def served_name(self, adapter: str) -> str:
        """The adapter's name on the daemon."""
        return self._prefix + adapter

    async def prepare(self) -> int:
        """Create the scenario's adapters that the daemon lacks; returns how many.

        Raises `CoserveError` leaves of the client, and `InvalidRequest` for an existing adapter of another rank.
        """
        return sum(
            await asyncio.gather(*(self._ensure(self.served_name(name)) for name in self._scenario.adapter_names))
        )

    async def _ensure(self, name: str) -> bool:
        try:
            adapter = await self._client.adapter(name)
        except AdapterNotFound:
            settings = LoraSettings(r=self._scenario.rank)
            self._touched.add(name)
            job = await self._client.finetune(name, [SEED_ROW], lora=settings, training=TrainingSettings(steps=1))
            self._jobs[job.id] = job
            await job.wait(progress=False)
            return True
        if adapter.rank != self._scenario.rank:
            raise InvalidRequest(f"expected {name} to be of rank {self._scenario.rank}, got {adapter.rank}")
        return False

    async def generate(self, arrival: PromptArrival) -> AsyncIterator[int]:
        chunks = self._client.stream(
            arrival.prompt,
            adapter=None if arrival.adapter is None else self.served_name(arrival.adapter),
            max_tokens=arrival.max_tokens,
            seed=arrival.seed,
            ignore_eos=True,
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                yield len(chunk.token_ids)

    async def submit(self, arrival: FinetuneArrival) -> str:
        job = await self.start(arrival)
        self._jobs[job.id] = job
        return job.id

    async def start(self, arrival: FinetuneArrival) -> AsyncJobHandle:
        """Submit the job of an arrival."""
        name, training = self.served_name(arrival.adapter), self._scenario.training
        return await self._client.finetune(name, arrival.rows, continue_from=name, training=training)

    async def watch(self, job: str) -> AsyncIterator[JobUpdate]:
        events = self._jobs[job].events()
        async with aclosing(events):
            async for event in events:
                self.seen(event)
                yield JobUpdate(tokens=0 if event.metrics is None else event.metrics.tokens, state=event.state)

    def seen(self, event: JobEvent) -> None:
        """Hook for showing the progress of jobs."""

    async def cancel(self, job: str) -> None:
        await self._jobs[job].cancel()

    async def clean_up(self) -> list[str]:
        """Cancel this target's running jobs and delete the adapters that `prepare` created; returns the names of those that
        could not be deleted.
        """
        await asyncio.gather(*(self._end(job) for job in self._jobs.values()))
        names = sorted(self._touched)
        gone = await asyncio.gather(*(self._delete(name) for name in names))
        return [name for name, deleted in zip(names, gone, strict=True) if not deleted]

    async def _end(self, job: AsyncJobHandle) -> None:
        with suppress(CoserveError):  # mostly: it has ended
            await job.cancel()

    async def _delete(self, name: str) -> bool:
        for attempt in range(DELETE_ATTEMPTS):
            try:
                await self._client.delete_adapter(name)
            except AdapterNotFound:  # its first job never ended
                return True
            except AdapterBusy:
                await asyncio.sleep(0.1 * 2**attempt)
            except CoserveError:
                return False
            else:
                return True
        return False
