"""An engine within the test's process, of fakes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from coserve.core.link.engine import Shutdown
from coserve.core.link.link import FromEngine, ToEngine
from coserve.engine.engine import Engine
from coserve.engine.job_runner import JobPlaces
from coserve.engine.ports import Generates, StoresAdapters, Trains
from coserve.queues.policies.slack import Slack
from coserve.queues.policy import Policy
from tests.support.fake_ports import FREE, FakeTrainer, Inline, Meter, NoAdapters
from tests.support.local_link import LocalLink, local_pair

Api = LocalLink[ToEngine, FromEngine]


@asynccontextmanager
async def running_engine(
    generator: Generates,
    trainer: Trains | None = None,
    policy: Policy | None = None,
    *,
    adapters: StoresAdapters | None = None,
    **options: Any,
) -> AsyncIterator[Api]:
    """The API's end of its link; at the end the engine is shut down.

    `trainer` None: it has no jobs. `options`: those of `Engine` that are not one place, on this thread, and the loop's
    clock.
    """
    clock = asyncio.get_running_loop().time
    api, own = local_pair()
    engine = Engine(
        generator,
        trainer or FakeTrainer(Meter(), FREE, {}, random.Random(0), clock),
        adapters or NoAdapters(),
        policy or Slack(1.0),
        own,
        **{"clock": clock, "jobs": JobPlaces(1, Inline())} | options,
    )

    async def run() -> None:
        try:
            await engine.run()
        finally:
            await own.close()

    running = asyncio.create_task(run())
    try:
        yield api
    finally:
        api.send(Shutdown())
        await running
