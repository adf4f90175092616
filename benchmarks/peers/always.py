"""A daemon that always trains: jobs that follow one another, whose steps are noted as the PEFT trainer's are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks.peers.processes import Trainer
from coserve.client import AsyncClient
from coserve.core.errors import WrongJobState
from coserve.core.training.jobs import JobState
from coserve.core.training.settings import TrainingSettings
from coserve.workloads.scenario import Scenario

JOBS = 5
"""Jobs at a time: one more than the daemon trains side by side by default, so that one always waits."""


@dataclass
class Jobs(Trainer):
    """`steps` of all jobs together. `published`: when jobs ended with success, on the monotonic clock."""

    published: list[float] = field(default_factory=list)

    async def train(
        self, client: AsyncClient, adapter: str, rows: Sequence[dict[str, Any]], training: TrainingSettings
    ) -> None:
        """One job, to its end. Raises `RuntimeError` where it does not succeed."""
        clock = asyncio.get_running_loop().time
        job = await client.finetune(adapter, rows, continue_from=adapter, training=training, on_conflict="fork")
        state: JobState | None = None
        try:
            async with aclosing(job.events()) as events:
                async for event in events:
                    state = event.state or state
                    if event.metrics is not None and event.metrics.tokens:
                        self.steps.append((clock(), event.metrics.tokens))
                        self.changed.set()
        except asyncio.CancelledError:
            with contextlib.suppress(WrongJobState):  # it has just ended
                await job.cancel()
            raise
        if state is not JobState.SUCCEEDED:
            raise RuntimeError(f"a job ended as {state}")
        self.published.append(clock())

    async def train_on(
        self, client: AsyncClient, adapter: str, rows: Sequence[dict[str, Any]], training: TrainingSettings, first: int
    ) -> None:
        """Jobs of an adapter without end, the first one of `first` steps, so that they end at different times."""
        settings = msgspec.structs.replace(training, steps=first)
        while True:
            await self.train(client, adapter, rows, settings)
            settings = training


@contextlib.asynccontextmanager
async def always_training(url: str, scenario: Scenario, rows: Sequence[dict[str, Any]]) -> AsyncIterator[Jobs]:
    """Keep `JOBS` jobs on the daemon, with the scenario's settings; they are cancelled with the block. It begins when
    they train.

    Raises what a job's failure raises (`ExceptionGroup`).
    """
    jobs, training = Jobs(), scenario.training
    assert training.steps is not None, "the scenario says how many steps a job has"
    async with AsyncClient(url) as client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(jobs.train_on(client, name, rows, training, -(-training.steps * (number + 1) // JOBS)))
            for number, name in enumerate(scenario.adapter_names[:JOBS])
        ]
        await jobs.ready()
        yield jobs
        for task in tasks:
            task.cancel()
