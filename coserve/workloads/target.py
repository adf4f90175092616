"""A running daemon as the target of a replay, through the SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing

from coserve.client import AsyncClient, AsyncJobHandle
from coserve.types import LoraSettings, TrainingSettings
from coserve.workloads.replay import Progress
from coserve.workloads.scenario import FinetuneArrival, PromptArrival


class DaemonTarget:
    """Sends a trace's arrivals with `client`. `ranks` names the rank of each adapter that is not `rank`.

    A prompt for an adapter that is not there yet is an error of that request (`adapter_not_found`), as it would be for
    any user; prepare the adapters first (`prepare`) where the scenario wants them all.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        training: TrainingSettings,
        rank: int = 16,
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        self._client, self._training = client, training
        self._rank, self._ranks = rank, dict(ranks or {})
        self._jobs: dict[str, AsyncJobHandle] = {}

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
        rank = self._ranks.get(arrival.adapter, self._rank)
        job = await self._client.finetune(
            arrival.adapter, list(arrival.rows), lora=LoraSettings(r=rank), training=self._training
        )
        self._jobs[job.id] = job
        return job.id

    async def watch(self, job: str) -> AsyncIterator[Progress]:
        events = self._jobs[job].events()
        async with aclosing(events):
            async for event in events:
                yield Progress(tokens=0 if event.metrics is None else event.metrics.tokens, state=event.state)

    async def cancel(self, job: str) -> None:
        await self._jobs[job].cancel()

    async def prepare(self, arrivals: list[FinetuneArrival]) -> None:
        """Fine-tune the given adapters and wait for them, so that the prompts that follow find them."""
        for arrival in arrivals:
            await self._jobs[await self.submit(arrival)].wait(progress=False)
