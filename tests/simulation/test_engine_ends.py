"""How the tick ends: by a shutdown, when the API process is gone, or by a fault."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from coserve.core.link.engine import EngineStopped, Shutdown
from coserve.core.link.generation import CancelRequest, Tokens
from coserve.core.link.jobs import JobCheckpoint, JobProgress, JobStarted, StartJob
from coserve.core.link.link import FromEngine, ToEngine
from coserve.core.link.stats import EngineStats
from coserve.engine.engine import Engine
from coserve.engine.job_runner import JobPlaces
from coserve.queues.policies.slack import Slack
from tests.support.fake_ports import FakeGenerator, FakeTrainer, Inline, JobPlan, Meter, NoAdapters, Prices
from tests.support.local_link import LocalLink, local_pair
from tests.support.records import make_request
from tests.support.scenario import job_spec
from tests.support.virtual_clock import run_virtual

PRICES = Prices(step=0.01, token=0.0, micro_step=0.01, spikes=0.0)


class Peer:
    """The API process's end of the link, with all messages that were received."""

    def __init__(self, link: LocalLink[ToEngine, FromEngine]) -> None:
        self.link, self.seen = link, list[FromEngine]()

    async def until(self, kind: type[FromEngine], count: int = 1) -> None:
        while sum(isinstance(message, kind) for message in self.seen) < count:
            self.seen.append(await self.link.receive())


Script = Callable[[Peer], Awaitable[None]]


class _FaultyGenerator(FakeGenerator):
    def cancel(self, id: str) -> None:
        raise ZeroDivisionError(id)


def live(script: Script, generator_type: type[FakeGenerator] = FakeGenerator) -> list[FromEngine]:
    async def main() -> list[FromEngine]:
        loop, rng, meter = asyncio.get_running_loop(), random.Random(0), Meter()
        api_end, engine_end = local_pair()
        engine = Engine(
            generator_type(meter, PRICES, 64, rng, 0.0),
            FakeTrainer(meter, PRICES, {"j0": JobPlan(1000, 4, 1000, None)}, rng, loop.time),
            NoAdapters(),
            Slack(1.0),
            engine_end,
            clock=loop.time,
            jobs=JobPlaces(1, Inline()),
            pace=meter.pace,
        )
        run = asyncio.create_task(engine.run())
        peer = Peer(api_end)
        await script(peer)
        await run
        await engine_end.close()
        await peer.until(EngineStopped)
        return [message for message in peer.seen if not isinstance(message, EngineStats)]

    return run_virtual(main())


async def _start_a_job(peer: Peer) -> None:
    peer.link.send(StartJob(spec=job_spec("j0")))
    await peer.until(JobProgress, 6)


def test_shutdown_saves_the_last_whole_step() -> None:
    async def script(peer: Peer) -> None:
        await _start_a_job(peer)
        peer.link.send(Shutdown())

    started, *steps, saved, stopped = live(script)
    assert started == JobStarted(id="j0", total_steps=1000)
    assert [step.metrics.step for step in steps if isinstance(step, JobProgress)] == list(range(1, len(steps) + 1))
    assert saved == JobCheckpoint(id="j0", step=len(steps)) and len(steps) > 5
    assert stopped == EngineStopped()


def test_an_engine_left_alone_saves_and_leaves() -> None:
    async def script(peer: Peer) -> None:
        await _start_a_job(peer)
        await peer.link.close()

    assert isinstance(live(script)[-2], JobCheckpoint)


def test_an_idle_engine_leaves_too() -> None:
    async def script(peer: Peer) -> None:
        await peer.until(EngineStats)  # sent before it sleeps
        peer.link.send(Shutdown())

    assert live(script) == [EngineStopped()]


def test_a_fault_in_a_messages_handling_ends_the_engine() -> None:
    async def script(peer: Peer) -> None:
        peer.link.send(make_request())
        await peer.until(Tokens)
        peer.link.send(CancelRequest(id="r"))

    with pytest.raises(ZeroDivisionError):
        live(script, _FaultyGenerator)
