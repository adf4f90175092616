"""The API process and the engine collect garbage while nothing waits; in a busy process it does not grow."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator, Sequence

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from coserve.api.http.server import Connections
from coserve.core.garbage import (
    FULL_INTERVAL,
    IDLE,
    MIDDLE_INTERVAL,
    YOUNG_WHEN_BUSY,
    YOUNG_WHEN_IDLE,
    GarbageCollection,
)
from coserve.core.link.generation import Tokens
from coserve.generate.plan import Ran, Scheduled
from tests.support.fake_ports import FakeGenerator, Meter, Prices
from tests.support.local_engine import running_engine
from tests.support.records import make_request
from tests.support.virtual_clock import run_virtual


class Interpreter:
    """Counts as the interpreter's collector does."""

    def __init__(self) -> None:
        self.counts = [0, 0, 0]
        self.collected: list[int] = []

    def count(self) -> tuple[int, int, int]:
        return self.counts[0], self.counts[1], self.counts[2]

    def collect(self, generation: int) -> int:
        self.collected.append(generation)
        if generation < 2:
            self.counts[generation + 1] += 1
        self.counts[: generation + 1] = [0] * (generation + 1)
        return 0


@given(st.lists(st.tuples(st.integers(0, 2 * YOUNG_WHEN_BUSY), st.booleans()), max_size=60))
def test_work_is_interrupted_only_for_the_bound(turns: list[tuple[int, bool]]) -> None:
    interpreter = Interpreter()
    garbage = GarbageCollection(interpreter.collect, interpreter.count)
    for made, idle in turns:
        interpreter.counts[0] += made
        before = interpreter.count()
        interpreter.collected.clear()
        if idle:
            garbage.when_idle()
            assert 2 not in interpreter.collected
            assert interpreter.counts[0] < YOUNG_WHEN_IDLE
        else:
            garbage.while_busy()
            assert bool(interpreter.collected) == (before[0] >= YOUNG_WHEN_BUSY)
            assert interpreter.counts[0] < YOUNG_WHEN_BUSY


def test_without_an_idle_moment_there_is_a_full_collection_in_the_end() -> None:
    interpreter = Interpreter()
    garbage = GarbageCollection(interpreter.collect, interpreter.count)
    turns = 0
    while 2 not in interpreter.collected:
        interpreter.counts[0] += YOUNG_WHEN_BUSY
        garbage.while_busy()
        turns += 1
        assert interpreter.counts[1] <= MIDDLE_INTERVAL
    assert turns == (MIDDLE_INTERVAL + 1) * FULL_INTERVAL + 1


def test_a_full_collection_is_due_once_something_was_made() -> None:
    interpreter = Interpreter()
    garbage = GarbageCollection(interpreter.collect, interpreter.count)
    assert not garbage.full_due
    interpreter.counts[0] = YOUNG_WHEN_IDLE
    garbage.when_idle()
    assert garbage.full_due, "what survived may be garbage by now"
    garbage.collect_all()
    assert interpreter.collected == [0, 2]
    assert not garbage.full_due


@pytest.fixture
def quiet() -> Iterator[None]:
    """No automatic collections."""
    gc.disable()
    yield
    gc.enable()


class Knot:
    """A cycle of itself."""

    alive = 0

    def __init__(self) -> None:
        self.own = self
        Knot.alive += 1

    def __del__(self) -> None:
        Knot.alive -= 1


def test_cycles_do_not_pile_up_under_a_load_without_end(quiet: None) -> None:
    garbage, most = GarbageCollection(), 0
    for _ in range(10 * YOUNG_WHEN_BUSY):
        Knot()
        garbage.while_busy()
        most = max(most, Knot.alive)
    assert YOUNG_WHEN_BUSY // 4 < most <= YOUNG_WHEN_BUSY


def test_it_waits_for_a_pause_between_requests() -> None:
    async def main() -> None:
        interpreter = Interpreter()
        garbage = GarbageCollection(interpreter.collect, interpreter.count)
        middleware = Connections(100, 1.0, garbage=garbage).middleware

        async def answer(seconds: float) -> None:
            async def handler(request: web.Request) -> web.StreamResponse:
                interpreter.counts[0] += YOUNG_WHEN_IDLE
                await asyncio.sleep(seconds)
                return web.Response()

            await middleware(make_mocked_request("GET", "/"), handler)

        stream = asyncio.create_task(answer(20 * IDLE))
        for _ in range(20):
            await answer(IDLE / 2)
            await asyncio.sleep(IDLE / 2)
            assert 2 not in interpreter.collected, "a stream is in progress, or a request has just ended"
        await stream
        await asyncio.sleep(2 * IDLE)
        assert interpreter.collected.count(2) == 1
        await asyncio.sleep(100 * IDLE)
        assert interpreter.collected.count(2) == 1

    run_virtual(main())


PRICES = Prices(step=0.1, token=0.0, micro_step=0.01, spikes=0.0)


class Littering(FakeGenerator):
    """Each step leaves containers behind, not enough to be worth an interruption."""

    interpreter: Interpreter

    def run(self, scheduled: Sequence[Scheduled]) -> Ran:
        self.interpreter.counts[0] += YOUNG_WHEN_IDLE // 10
        assert self.interpreter.collected.count(2) == 0, "a request runs"
        return super().run(scheduled)


def test_a_request_is_not_interrupted_and_the_idle_engine_collects_once() -> None:
    async def main() -> list[int]:
        meter, interpreter = Meter(), Interpreter()
        generator = Littering(meter, PRICES, 64, random.Random(0), 0.0)
        generator.interpreter = interpreter
        garbage = GarbageCollection(interpreter.collect, interpreter.count)
        async with running_engine(generator, pace=meter.pace, garbage=garbage) as api:
            api.send(make_request(max_tokens=30))
            while not (isinstance(message := await api.receive(), Tokens) and message.finished):
                assert interpreter.collected == []
            await asyncio.sleep(IDLE / 2)
            assert interpreter.collected == [0], "the young generation, at once"
            await asyncio.sleep(IDLE)
            assert interpreter.collected == [0, 2]
            await asyncio.sleep(100 * IDLE)
        return interpreter.collected

    assert run_virtual(main()) == [0, 2]
