"""Many messages at once hold up no step: the engine has a chance to serve between them. In virtual time."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

from coserve.core.link.engine import DropAdapter
from coserve.core.link.generation import Tokens
from coserve.core.types import AdapterRef
from coserve.engine.inbox import MESSAGES_AT_ONCE
from tests.support.fake_ports import FakeGenerator, Meter, NoAdapters, Prices
from tests.support.local_engine import running_engine
from tests.support.records import make_request
from tests.support.virtual_clock import run_virtual

PRICES = Prices(step=0.01, token=0.0, micro_step=0.01, spikes=0.0)
COST, MESSAGES = 0.001, 200


class SlowToDrop(NoAdapters):
    """Forgetting an adapter takes `COST` seconds."""

    dropped = 0

    def drop(self, ref: AdapterRef) -> None:
        self.dropped += 1


def test_a_burst_is_handled_between_steps() -> None:
    async def main() -> list[int]:
        loop, meter, adapters = asyncio.get_running_loop(), Meter(), SlowToDrop()
        generator = FakeGenerator(meter, PRICES, 64, random.Random(0), 0.0)

        def clock() -> float:
            return loop.time() + COST * adapters.dropped

        async with running_engine(generator, adapters=adapters, clock=clock, pace=meter.pace) as api:
            api.send(make_request())
            while not isinstance(await api.receive(), Tokens):
                pass
            for _ in range(MESSAGES):
                api.send(DropAdapter(ref=AdapterRef("a", 1)))
            seen = [0]
            while seen[-1] < MESSAGES:
                if isinstance(await api.receive(), Tokens):
                    seen.append(adapters.dropped)
            return seen

    seen = run_virtual(main())
    most = round(MESSAGES_AT_ONCE / COST) + 1
    assert max(after - before for before, after in pairwise(seen)) <= most
