"""When an engine is started again, and when not: exact, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from coserve.errors import StartupError, UnsupportedBase
from coserve.link import EngineReady, FromEngine, Link, ToEngine, local_pair
from coserve.supervisor import EngineDied, Restarts, Supervisor
from tests.support.fake_engine import make_base
from tests.support.virtual_clock import run_virtual

READY = EngineReady(spec=make_base(8), kv_tokens=64, lora_way="reference")
LOAD = 3.0


@dataclass(frozen=True)
class Dies:
    """After so many seconds of service; None: while it starts."""

    served: float | None = None
    status: int = -9


@dataclass
class Engine:
    end: Dies
    link: Link[ToEngine, FromEngine] = field(default_factory=lambda: local_pair()[0])
    ready: EngineReady = READY
    stopped: bool = False

    async def wait(self) -> int:
        assert self.end.served is not None
        await asyncio.sleep(self.end.served)
        return self.end.status

    async def stop(self) -> None:
        self.stopped = True


@dataclass
class World:
    """Engines that come to the ends that were laid down for them, and the service that uses them."""

    ends: list[Dies | StartupError]
    started: list[float] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    attached: int = 0
    lost: int = 0
    notes: list[tuple[str, bool]] = field(default_factory=list)

    async def start(self) -> Engine:
        self.started.append(asyncio.get_running_loop().time())
        end = self.ends.pop(0)
        await asyncio.sleep(LOAD)
        if isinstance(end, StartupError):
            raise end
        if end.served is None:
            raise EngineDied(end.status)
        self.engines.append(Engine(end))
        return self.engines[-1]

    async def attach(self, link: Link[ToEngine, FromEngine], ready: EngineReady) -> None:
        self.attached += 1

    def engine_lost(self) -> None:
        self.lost += 1

    def engine_failed(self, note: str, *, started: bool) -> None:
        self.notes.append((note, started))


def live(ends: Sequence[Dies | StartupError]) -> tuple[World, str]:
    """What happened until the supervisor gave up, and what it said."""
    world = World(list(ends))

    async def main() -> str:
        supervisor = Supervisor(world.start, world, clock=asyncio.get_running_loop().time)
        with pytest.raises(StartupError) as caught:
            await supervisor.run()
        return caught.value.message

    return world, run_virtual(main())


REFUSAL = UnsupportedBase("this base cannot be served")


def test_one_that_dies_while_it_starts_is_started_again_as_any_other() -> None:
    world, said = live([Dies(), Dies(), Dies(3.0), Dies(1.0), REFUSAL])
    assert said == REFUSAL.message
    pauses = [0.5, 1.0, 2.0, 4.0]
    served = [0.0, 0.0, 3.0, 1.0]
    expected, at = [0.0], 0.0
    for pause, seconds in zip(pauses, served, strict=True):
        at += LOAD + seconds + pause
        expected.append(at)
    assert world.started == pytest.approx(expected)
    assert (world.attached, world.lost) == (2, 2)
    assert [started for _, started in world.notes] == [False, False, True, True]
    assert world.notes[0][0] == "the engine was killed by SIGKILL while it started and is being started again"
    assert all(engine.stopped for engine in world.engines)


@pytest.mark.parametrize("early", [Dies(), Dies(2.0)])
def test_it_gives_up_after_so_many_early_deaths_in_a_row(early: Dies) -> None:
    world, said = live([early] * 10)
    assert len(world.started) == Restarts().most
    assert said.startswith("the engine died 5 times in a row, the last time it was killed by SIGKILL")


def test_one_that_has_served_long_is_started_again_at_once_and_counts_for_nothing() -> None:
    long = Dies(100.0, status=1)
    world, said = live([Dies(), Dies(), long, long, *[Dies()] * 4, long, REFUSAL])
    assert said == REFUSAL.message
    assert world.started[3] - world.started[2] == pytest.approx(LOAD + 100)
    assert world.notes[2] == ("the engine ended with status 1 after 100 s of service and is being started again", True)


def test_the_pause_doubles_up_to_a_cap() -> None:
    restarts = Restarts(most=100)
    assert [restarts.pause(deaths) for deaths in range(9)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_refusal_ends_at_once() -> None:
    world, said = live([REFUSAL])
    assert said == REFUSAL.message
    assert len(world.started) == 1
    assert world.notes == []


@pytest.mark.parametrize("at", [1.0, LOAD + 0.2, LOAD + 5.0])
def test_cancelled_while_it_starts_pauses_or_serves_it_leaves_no_engine(at: float) -> None:
    world = World([Dies() if at == LOAD + 0.2 else Dies(100.0), Dies(100.0)])

    async def main() -> None:
        task = asyncio.create_task(Supervisor(world.start, world).run())
        await asyncio.sleep(at)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run_virtual(main())
    assert all(engine.stopped for engine in world.engines)
    assert len(world.started) == 1
