"""An API process that does not read is no secret."""

from __future__ import annotations

import asyncio
import random

import pytest

from coserve.core.link.engine import Shutdown
from coserve.core.link.link import FromEngine, ToEngine
from coserve.core.link.stats import EngineStats
from coserve.engine.engine import Engine
from coserve.engine.gauges import LOGGED_BACKLOG
from coserve.engine.job_runner import JobPlaces
from coserve.queues.policies.slack import Slack
from tests.support.fake_ports import FakeGenerator, FakeTrainer, Meter, NoAdapters, Prices
from tests.support.local_link import LocalLink
from tests.support.virtual_clock import run_virtual

PRICES = Prices(step=0.01, token=0.0, micro_step=0.01, spikes=0.0)


class Unread(LocalLink[FromEngine, ToEngine]):
    backlog = LOGGED_BACKLOG


def test_a_backlog_is_reported_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> FromEngine | None:
        loop, rng, meter = asyncio.get_running_loop(), random.Random(0), Meter()
        to_engine, from_engine = asyncio.Queue[ToEngine | None](), asyncio.Queue[FromEngine | None]()
        engine = Engine(
            FakeGenerator(meter, PRICES, 64, rng, 0.0),
            FakeTrainer(meter, PRICES, {}, rng, loop.time),
            NoAdapters(),
            Slack(1.0),
            Unread(from_engine, to_engine),
            clock=loop.time,
            jobs=JobPlaces(),
            pace=meter.pace,
        )
        run = asyncio.create_task(engine.run())
        first = await from_engine.get()
        to_engine.put_nowait(Shutdown())
        await run
        return first

    stats = run_virtual(main())
    assert isinstance(stats, EngineStats) and stats.backlog == LOGGED_BACKLOG
    assert [record.getMessage() for record in caplog.records] == [
        "the API process does not read what the engine sends: 8 MiB wait"
    ]
