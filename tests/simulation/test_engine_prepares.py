"""Work that later steps would have to do, such as the capture of a graph, is done in pieces while no request runs."""

from __future__ import annotations

import asyncio
import random

from coserve.core.link.engine import EngineStopped, Shutdown
from coserve.core.link.generation import Generate, Tokens
from coserve.core.link.link import FromEngine, ToEngine
from coserve.core.sampling import SamplingParams
from coserve.core.types import Slo
from coserve.engine.engine import Engine
from coserve.queues.policies.slack import Slack
from tests.support.fake_ports import FakeGenerator, FakeTrainer, Meter, NoAdapters, Prices
from tests.support.local_link import LocalLink, local_pair

FREE = Prices(step=0.0, token=0.0, micro_step=0.0, spikes=0.0)


class Preparing(FakeGenerator):
    """Has some work to do ahead."""

    pieces = 0
    prepared: list[int]
    """How many requests ran at each piece."""
    ready: asyncio.Event

    def prepare(self) -> bool:
        if self.pieces:
            self.pieces -= 1
            self.prepared.append(self.running)
            return True
        if self.prepared:
            self.ready.set()
        return False


def begin(pieces: int) -> tuple[Engine, Preparing, LocalLink[ToEngine, FromEngine]]:
    meter, rng, loop = Meter(), random.Random(0), asyncio.get_running_loop()
    generator = Preparing(meter, FREE, 64, rng, 0.0)
    generator.prepared, generator.ready, generator.pieces = [], asyncio.Event(), pieces
    api, engine_end = local_pair()
    trainer = FakeTrainer(meter, FREE, {}, rng, loop.time)
    engine = Engine(generator, trainer, NoAdapters(), Slack(1.0), engine_end, clock=loop.time)
    return engine, generator, api


async def until(api: LocalLink[ToEngine, FromEngine], kind: type[FromEngine]) -> list[FromEngine]:
    heard = [await api.receive()]
    while not isinstance(heard[-1], kind):
        heard.append(await api.receive())
    return heard


def request(id: str, tokens: int) -> Generate:
    return Generate(
        id=id, prompt=(1, 2), sampling=SamplingParams(max_tokens=tokens), adapter=None, slo=Slo(ttft=1.0, tpot=1.0)
    )


async def test_pieces_are_done_when_no_request_runs() -> None:
    engine, generator, api = begin(0)
    running = asyncio.create_task(engine.run())
    api.send(request("long", 500))
    await until(api, Tokens)
    generator.pieces = 3  # a graph that a new adapter needs
    await asyncio.wait_for(generator.ready.wait(), 240)
    assert generator.prepared == [0, 0, 0]
    api.send(Shutdown())
    await until(api, EngineStopped)
    await running


async def test_an_idle_engine_does_pieces_at_once() -> None:
    engine, generator, api = begin(3)
    running = asyncio.create_task(engine.run())
    await asyncio.wait_for(generator.ready.wait(), 240)
    assert generator.prepared == [0, 0, 0]
    api.send(Shutdown())
    await until(api, EngineStopped)
    await running
