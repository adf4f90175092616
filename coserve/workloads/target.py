"""A running daemon as the target of a replay, through the SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from coserve.client import AsyncClient, AsyncJobHandle, RetryPolicy
from coserve.errors import AdapterNotFound, InvalidRequest
from coserve.schemas import JobEvent
from coserve.types import LoraSettings, TrainingSettings
from coserve.workloads.replay import Progress
from coserve.workloads.scenario import FinetuneArrival, PromptArrival, Scenario

NO_RETRIES = RetryPolicy(attempts=1)
"""For the client of a replay: a refusal is a result, and a request sent twice is not the load that was asked for."""
SEED_ROW = {"text": "A first row, so that the adapter exists."}


class DaemonTarget:
    """Sends a trace's arrivals with `client`; every job continues its adapter, which `prepare` makes first."""

    def __init__(self, client: AsyncClient, scenario: Scenario) -> None:
        self._client, self._scenario = client, scenario
        self._jobs: dict[str, AsyncJobHandle] = {}

    async def prepare(self) -> int:
        """Make the scenario's adapters that the daemon lacks; how many. Raises what keeps it from that, and
        `InvalidRequest` where one is there with another rank.
        """
        return sum(await asyncio.gather(*(self._ensure(name) for name in self._scenario.adapter_names)))

    async def _ensure(self, name: str) -> bool:
        try:
            adapter = await self._client.adapter(name)
        except AdapterNotFound:
            settings = LoraSettings(r=self._scenario.rank)
            job = await self._client.finetune(name, [SEED_ROW], lora=settings, training=TrainingSettings(steps=1))
            await job.wait(progress=False)
            return True
        if adapter.rank != self._scenario.rank:
            raise InvalidRequest(f"expected {name} to be of rank {self._scenario.rank}, got {adapter.rank}")
        return False

    async def generate(self, arrival: PromptArrival) -> AsyncIterator[int]:
        chunks = self._client.stream(
            arrival.prompt,
            adapter=arrival.adapter,
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
        """The request that makes a job of an arrival."""
        training = self._scenario.training
        return await self._client.finetune(
            arrival.adapter, arrival.rows, continue_from=arrival.adapter, training=training
        )

    async def watch(self, job: str) -> AsyncIterator[Progress]:
        events = self._jobs[job].events()
        async with aclosing(events):
            async for event in events:
                self.seen(event)
                yield Progress(tokens=0 if event.metrics is None else event.metrics.tokens, state=event.state)

    def seen(self, event: JobEvent) -> None:
        """For those who show the jobs' progress."""

    async def cancel(self, job: str) -> None:
        await self._jobs[job].cancel()
