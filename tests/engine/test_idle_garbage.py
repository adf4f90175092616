"""The engine collects all garbage when it has slept for a while, and never while requests run. In virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from coserve.core.garbage import IDLE, YOUNG_WHEN_IDLE, GarbageCollection
from coserve.core.link.engine import EngineStopped, Shutdown
from coserve.core.link.generation import Generate, Tokens
from coserve.core.sampling import SamplingParams
from coserve.core.types import Slo
from coserve.engine.engine import Engine
from coserve.generate.plan import Ran, Share
from coserve.queues.policies.slack import Slack
from tests.support.fake_ports import FakeGenerator, FakeTrainer, Meter, NoAdapters, Prices
from tests.support.interpreter import Interpreter
from tests.support.local_link import local_pair
from tests.support.virtual_clock import run_virtual

PRICES = Prices(step=0.1, token=0.0, micro_step=0.01, spikes=0.0)
REQUEST = Generate(
    id="r", prompt=(1, 2), sampling=SamplingParams(max_tokens=30), adapter=None, slo=Slo(ttft=1.0, tpot=1.0)
)


class Littering(FakeGenerator):
    """Each step leaves containers behind, not enough to be worth an interruption."""

    interpreter: Interpreter

    def run(self, shares: Sequence[Share]) -> Ran:
        self.interpreter.counts[0] += YOUNG_WHEN_IDLE // 10
        assert self.interpreter.collected.count(2) == 0, "a request runs"
        return super().run(shares)


def test_a_request_is_not_interrupted_and_the_idle_engine_collects_once() -> None:
    async def main() -> list[int]:
        loop, rng, meter, interpreter = asyncio.get_running_loop(), random.Random(0), Meter(), Interpreter()
        generator = Littering(meter, PRICES, 64, rng, 0.0)
        generator.interpreter = interpreter
        api, engine_end = local_pair()
        engine = Engine(
            generator,
            FakeTrainer(meter, PRICES, {}, rng, loop.time),
            NoAdapters(),
            Slack(1.0),
            engine_end,
            clock=loop.time,
            pace=meter.pace,
            garbage=GarbageCollection(interpreter.collect, interpreter.count),
        )
        run = asyncio.create_task(engine.run())
        api.send(REQUEST)
        while not (isinstance(message := await api.receive(), Tokens) and message.finished):
            assert interpreter.collected == []
        await asyncio.sleep(IDLE / 2)
        assert interpreter.collected == [0], "the young generation, at once"
        await asyncio.sleep(IDLE)
        assert interpreter.collected == [0, 2]
        await asyncio.sleep(100 * IDLE)
        api.send(Shutdown())
        while not isinstance(await api.receive(), EngineStopped):
            pass
        await run
        return interpreter.collected

    assert run_virtual(main()) == [0, 2]
