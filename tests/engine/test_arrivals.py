"""A request's targets count from its arrival at the API, also where the engine was busy with a slice."""

from __future__ import annotations

import asyncio
import random

import pytest

from coserve.core.link.generation import Generate, RequestFailed, Tokens
from coserve.core.types import Slo
from tests.support.fake_ports import FakeGenerator, Meter, Prices
from tests.support.local_engine import running_engine
from tests.support.records import make_request
from tests.support.virtual_clock import run_virtual


async def _refused(waited: float) -> bool:
    """Whether a request with a target of a second for its first token is refused that arrived so long ago and finds no
    place."""
    loop, meter = asyncio.get_running_loop(), Meter()
    generator = FakeGenerator(meter, Prices(0.1, 0.0, 0.0, 0.0), 64, random.Random(0), 0.0, max_running=1)

    def ask(id: str, tokens: int, arrived: float | None) -> Generate:
        slo = Slo(ttft=1.0, tpot=1.0, shed=True) if id == "late" else Slo(ttft=9.0, tpot=1.0)
        return make_request(id, tokens, prompt=1, slo=slo, arrived=arrived)

    async with running_engine(generator, pace=meter.pace) as api:
        await asyncio.sleep(5.0)
        api.send(ask("first", 8, None))
        await asyncio.sleep(0.15)
        api.send(ask("late", 1, loop.time() - waited))
        while True:
            match await api.receive():
                case RequestFailed(id="late"):
                    return True
                case Tokens(id="late", finished=str()):
                    return False


@pytest.mark.parametrize(("waited", "refused"), [(0.0, False), (0.6, True)])
def test_targets_count_from_the_arrival(waited: float, refused: bool) -> None:
    assert run_virtual(_refused(waited)) == refused
