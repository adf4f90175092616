"""Many messages at once hold up no step: the engine has a chance to serve between them. In virtual time."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

from coserve.core.link.engine import DropAdapter, Shutdown
from coserve.core.link.generation import Generate, Tokens
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, Slo
from coserve.engine.engine import Engine
from coserve.engine.inbox import MESSAGES_AT_ONCE
from coserve.queues.policies.slack import Slack
from tests.support.fake_ports import FakeGenerator, FakeTrainer, Meter, NoAdapters, Prices
from tests.support.local_link import local_pair
from tests.support.virtual_clock import run_virtual

PRICES = Prices(step=0.01, token=0.0, micro_step=0.01, spikes=0.0)
COST, MESSAGES = 0.001, 200
REQUEST = Generate(
    id="r", prompt=(1, 2), sampling=SamplingParams(max_tokens=500), adapter=None, slo=Slo(ttft=1.0, tpot=1.0)
)


class SlowToDrop(NoAdapters):
    """Forgetting an adapter takes `COST` seconds."""

    dropped = 0

    def drop(self, ref: AdapterRef) -> None:
        self.dropped += 1


def test_a_burst_is_handled_between_steps() -> None:
    async def main() -> list[int]:
        loop, rng, meter, adapters = asyncio.get_running_loop(), random.Random(0), Meter(), SlowToDrop()
        api, engine_end = local_pair()
        engine = Engine(
            FakeGenerator(meter, PRICES, 64, rng, 0.0),
            FakeTrainer(meter, PRICES, {}, rng, loop.time),
            adapters,
            Slack(1.0),
            engine_end,
            clock=lambda: loop.time() + COST * adapters.dropped,
            pace=meter.pace,
        )
        run = asyncio.create_task(engine.run())
        api.send(REQUEST)
        while not isinstance(await api.receive(), Tokens):
            pass
        for _ in range(MESSAGES):
            api.send(DropAdapter(ref=AdapterRef("a", 1)))
        seen = [0]
        while seen[-1] < MESSAGES:
            if isinstance(await api.receive(), Tokens):
                seen.append(adapters.dropped)
        api.send(Shutdown())
        await run
        return seen

    seen = run_virtual(main())
    most = round(MESSAGES_AT_ONCE / COST) + 1
    assert max(after - before for before, after in pairwise(seen)) <= most
