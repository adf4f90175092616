"""A request's targets count from its arrival at the API, also where the engine was busy with a slice."""

from __future__ import annotations

import asyncio
import random

import pytest

from coserve.core.link.engine import EngineStopped, Shutdown
from coserve.core.link.generation import Generate, RequestFailed
from coserve.core.link.link import FromEngine, ToEngine
from coserve.core.sampling import SamplingParams
from coserve.core.types import Slo
from coserve.engine.engine import Engine
from coserve.engine.job_runner import JobPlaces
from coserve.queues.policies.slack import Slack
from tests.support.fake_ports import FakeGenerator, FakeTrainer, Inline, Meter, NoAdapters, Prices
from tests.support.local_link import LocalLink
from tests.support.virtual_clock import run_virtual

FREE = Prices(0.0, 0.0, 0.0, 0.0)


async def _refused(waited: float) -> bool:
    """Whether a request with a target of a second for its first token is refused that arrived so long ago and finds no
    place."""
    loop, meter, rng = asyncio.get_running_loop(), Meter(), random.Random(0)
    to_engine, from_engine = asyncio.Queue[ToEngine | None](), asyncio.Queue[FromEngine | None]()
    api: LocalLink[ToEngine, FromEngine] = LocalLink(to_engine, from_engine)
    generator = FakeGenerator(meter, Prices(0.1, 0.0, 0.0, 0.0), 64, rng, 0.0, max_running=1)
    engine = Engine(
        generator,
        FakeTrainer(meter, FREE, {}, rng, loop.time),
        NoAdapters(),
        Slack(1.0),
        LocalLink(from_engine, to_engine),
        clock=loop.time,
        jobs=JobPlaces(1, Inline()),
        pace=meter.pace,
    )
    run = asyncio.create_task(engine.run())
    await asyncio.sleep(5.0)

    def ask(id: str, tokens: int, arrived: float | None) -> None:
        slo = Slo(ttft=1.0, tpot=1.0, shed=True) if id == "late" else Slo(ttft=9.0, tpot=1.0)
        sampling = SamplingParams(max_tokens=tokens)
        api.send(Generate(id=id, prompt=(1,), sampling=sampling, adapter=None, slo=slo, arrived=arrived))

    ask("first", 8, None)
    await asyncio.sleep(0.15)
    ask("late", 1, loop.time() - waited)
    refused = False
    while not refused:
        message = await api.receive()
        refused = isinstance(message, RequestFailed) and message.id == "late"
        if getattr(message, "finished", None) is not None and message.id == "late":  # type: ignore[union-attr]
            break
    api.send(Shutdown())
    while not isinstance(await api.receive(), EngineStopped):
        pass
    await run
    return refused


@pytest.mark.parametrize(("waited", "refused"), [(0.0, False), (0.6, True)])
def test_targets_count_from_the_arrival(waited: float, refused: bool) -> None:
    assert run_virtual(_refused(waited)) == refused
