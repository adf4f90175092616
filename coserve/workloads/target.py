"""A running daemon as the target of a replay, through the SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, suppress

from coserve.client import AsyncClient, AsyncJobHandle, RetryPolicy
from coserve.errors import AdapterBusy, AdapterNotFound, CoserveError, InvalidRequest
from coserve.schemas import JobEvent
from coserve.types import LoraSettings, TrainingSettings
from coserve.workloads.gauges import Snapshot, read_snapshot
from coserve.workloads.openai_target import OpenAITarget
from coserve.workloads.replay import JobUpdate, Usage
from coserve.workloads.scenario import Scenario
from coserve.workloads.trace import FinetuneArrival, PromptArrival

NO_RETRIES = RetryPolicy(attempts=1)
"""For the client of a replay: a refusal is a result, and retries would change the load."""
DELETE_ATTEMPTS = 6
PREPARED_AT_ONCE = 64
"""Adapters that are made at a time: the daemon's queue of jobs is bounded."""
SEED_ROW = {"text": "A first row, so that the adapter exists."}


class DaemonTarget:
    """Sends a trace's arrivals with `client`; every job continues its adapter, which `prepare` makes first.

    `prefix` of the adapters' names on the daemon, so that a replay has adapters of its own; `clean_up` deletes them. With
    `completions`, prompts are sent through it, as to any OpenAI-style server.
    """

    def __init__(
        self, client: AsyncClient, scenario: Scenario, *, prefix: str = "", completions: OpenAITarget | None = None
    ) -> None:
        self._client, self._scenario, self._prefix, self._completions = client, scenario, prefix, completions
        self._jobs: dict[str, AsyncJobHandle] = {}
        self._touched: set[str] = set()

    def served_name(self, adapter: str) -> str:
        """The adapter's name on the daemon."""
        return self._prefix + adapter

    async def prepare(self, names: Iterable[str] = ()) -> int:
        """Create the scenario's adapters, and those of other `names`, that the daemon lacks; returns how many.

        Raises `CoserveError` leaves of the client, and `InvalidRequest` for an existing adapter of another rank.
        """
        ranks = {name: self._scenario.rank_of(i) for i, name in enumerate(self._scenario.adapter_names)}
        ranks |= {name: self._scenario.rank_of(i) for i, name in enumerate(names) if name not in ranks}
        limit = asyncio.Semaphore(PREPARED_AT_ONCE)

        async def ensure(name: str, rank: int) -> bool:
            async with limit:
                return await self._ensure(self.served_name(name), rank)

        return sum(await asyncio.gather(*(ensure(name, rank) for name, rank in ranks.items())))

    async def _ensure(self, name: str, rank: int) -> bool:
        try:
            adapter = await self._client.adapter(name)
        except AdapterNotFound:
            settings = LoraSettings(r=rank, targets=self._scenario.targets or None)
            self._touched.add(name)
            job = await self._client.finetune(name, [SEED_ROW], lora=settings, training=TrainingSettings(steps=1))
            self._jobs[job.id] = job
            await job.wait(progress=False)
            return True
        if adapter.rank != rank:
            raise InvalidRequest(f"expected {name} to be of rank {rank}, got {adapter.rank}")
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
                    yield Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)

    async def probe(self, at: float) -> Snapshot:
        """The gauges of `/metrics`."""
        return read_snapshot(await self._client.metrics(), at)

    async def submit(self, arrival: FinetuneArrival) -> str:
        job = await self.start(arrival)
        self._jobs[job.id] = job
        return job.id

    async def start(self, arrival: FinetuneArrival) -> AsyncJobHandle:
        """Submit the job of an arrival."""
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
