"""How the engine process starts, and when it is started again and when not: exact, in virtual time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coserve.cli.daemon import engine_process
from coserve.cli.daemon.engine_process import EngineDied, EngineProcess, EngineStarts
from coserve.cli.daemon.supervisor import MOST, Supervisor
from coserve.config import Config
from coserve.core.errors import LoraServersMissing, StartupError, UnsupportedBase
from coserve.core.gpu_memory import PoolShape
from coserve.core.health import EngineRanks
from coserve.core.link.engine import EngineReady, EngineWarming
from coserve.core.link.link import FromEngine, Link, ToEngine
from tests.support.fake_engine import make_base
from tests.support.local_link import local_pair
from tests.support.virtual_clock import run_virtual

READY = EngineReady(spec=make_base(8), kv_tokens=64, pool=PoolShape(4, 1 << 20, 16), lora_backend="reference")
LOAD = 3.0


@dataclass(frozen=True)
class Dies:
    """After so many seconds of service; None: while it starts."""

    served: float | None = None
    status: int = -9
    unreadable: bool = False
    """It lives on, and what it says cannot be read."""
    hangs: bool = False
    """It lives on, and says nothing."""


@dataclass
class Engine:
    fate: Dies
    link: Link[ToEngine, FromEngine] = field(default_factory=lambda: local_pair()[0])
    ready: EngineReady = READY
    ranks: EngineRanks | None = None
    loss: str | None = None
    stopped: bool = False
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    born: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    async def wait(self) -> int:
        assert self.fate.served is not None
        if self.fate.unreadable or self.fate.hangs:
            await self.stopping.wait()
        else:
            await asyncio.sleep(self.fate.served - (asyncio.get_running_loop().time() - self.born))
        return self.fate.status

    def end(self, loss: str) -> None:
        self.loss = loss
        self.stopping.set()

    async def stop(self) -> None:
        self.stopped = True
        self.stopping.set()


@dataclass
class World:
    """Engines that come to the ends that were laid down for them, and the service that uses them."""

    ends: list[Dies | StartupError]
    started: list[float] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    attach_takes: float = 0.0
    start_cancelled: bool = False
    attached: int = 0
    lost: int = 0
    notes: list[tuple[str, bool]] = field(default_factory=list)

    async def start(self) -> Engine:
        self.started.append(asyncio.get_running_loop().time())
        end = self.ends.pop(0)
        try:
            await asyncio.sleep(LOAD)
        except asyncio.CancelledError:
            self.start_cancelled = True
            raise
        if isinstance(end, StartupError):
            raise end
        if end.served is None:
            raise EngineDied(end.status)
        self.engines.append(Engine(end))
        return self.engines[-1]

    async def attach(
        self, link: Link[ToEngine, FromEngine], ready: EngineReady, ranks: EngineRanks | None = None
    ) -> None:
        await asyncio.sleep(self.attach_takes)
        self.attached += 1

    async def disconnected(self) -> Exception | None:
        end = self.engines[-1].fate
        if not end.unreadable:
            await asyncio.Event().wait()
        assert end.served is not None
        await asyncio.sleep(end.served)
        return ValueError("no message")

    async def engine_hung(self) -> str:
        fate = self.engines[-1].fate
        if not fate.hangs:
            await asyncio.Event().wait()
        assert fate.served is not None
        await asyncio.sleep(fate.served)
        return "it said nothing for 600 s"

    def engine_lost(self) -> None:
        self.lost += 1

    def engine_failed(self, note: str, *, started: bool) -> None:
        self.notes.append((note, started))


def live(ends: Sequence[Dies | StartupError], *, attach_takes: float = 0.0) -> tuple[World, str]:
    """What happened until the supervisor gave up, and what it said."""
    world = World(list(ends), attach_takes=attach_takes)

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
    assert len(world.started) == MOST
    assert said.startswith("the engine died 5 times in a row, the last time it was killed by SIGKILL")


def test_one_that_has_served_long_is_started_again_at_once_and_counts_for_nothing() -> None:
    long = Dies(100.0, status=1)
    world, said = live([Dies(), Dies(), long, long, *[Dies()] * 4, long, REFUSAL])
    assert said == REFUSAL.message
    assert world.started[3] - world.started[2] == pytest.approx(LOAD + 100)
    assert world.notes[2] == ("the engine ended with status 1 after 100 s of service and is being started again", True)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (Dies(50.0, status=0, unreadable=True), "its messages could not be read"),
        (Dies(50.0, hangs=True), "it said nothing for 600 s"),
    ],
)
def test_one_that_cannot_be_read_or_hangs_is_stopped_and_started_again(end: Dies, why: str) -> None:
    world, _ = live([end, REFUSAL])
    assert world.engines[0].stopped and world.lost >= 1
    (note, started), *_ = world.notes
    assert started and note.startswith(f"the engine was stopped after 50 s of service: {why}")


def test_one_that_dies_while_it_is_attached_died_early() -> None:
    world, said = live([Dies(20.0)] * 10, attach_takes=1000.0)
    assert said.startswith("the engine died 5 times in a row") and len(world.started) == MOST
    assert world.attached == 0 and all(engine.stopped for engine in world.engines)


def test_the_time_to_attach_it_is_no_service() -> None:
    world, said = live([Dies(25.0)] * 10, attach_takes=20.0)
    assert said.startswith("the engine died 5 times in a row") and world.attached == MOST


def test_a_refusal_ends_at_once() -> None:
    world, said = live([REFUSAL])
    assert said == REFUSAL.message
    assert len(world.started) == 1
    assert world.notes == []


def test_servers_that_several_engines_use_may_start_later_than_an_engine_that_died() -> None:
    """Without them the first engine refuses the start; a later one is started again."""
    missing = LoraServersMissing("the LoRA servers did not start")
    world, said = live([missing])
    assert (said, len(world.started)) == (missing.message, 1)
    world, said = live([Dies(25.0), missing, Dies(25.0), REFUSAL])
    assert said == REFUSAL.message and world.attached == 2
    assert world.notes[1][0].startswith("the engine was stopped while it started: the LoRA servers did not start")


@dataclass(frozen=True)
class Cut:
    """When the supervisor is cancelled, and what is there then."""

    at: float
    end: Dies
    attach_takes: float = 0.0
    engines: int = 0


@pytest.mark.parametrize(
    "cut",
    [
        Cut(1.0, Dies(100.0)),
        Cut(LOAD + 0.2, Dies()),
        Cut(LOAD + 5.0, Dies(100.0), attach_takes=50.0, engines=1),
        Cut(LOAD + 5.0, Dies(100.0), engines=1),
    ],
    ids=["starts", "pauses", "attaches", "serves"],
)
def test_cancelled_it_leaves_no_engine(cut: Cut) -> None:
    world = World([cut.end, Dies(100.0)], attach_takes=cut.attach_takes)

    async def main() -> None:
        task = asyncio.create_task(Supervisor(world.start, world).run())
        await asyncio.sleep(cut.at)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await asyncio.sleep(1000.0)

    run_virtual(main())
    assert len(world.started) == 1, "no further one"
    assert world.start_cancelled == (cut.at < LOAD)
    assert [engine.stopped for engine in world.engines] == [True] * cut.engines


async def test_a_start_that_is_cancelled_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that never says anything."""
    real, made = asyncio.create_subprocess_exec, list[asyncio.subprocess.Process]()
    born = asyncio.Event()

    async def stand_in(program: str, *args: str, **kwargs: Any) -> asyncio.subprocess.Process:
        made.append(await real(program, "-c", "import time; time.sleep(600)", **kwargs))
        born.set()
        return made[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", stand_in)
    task = asyncio.create_task(EngineProcess.start(Config(data_dir=tmp_path)))
    await born.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and made[0].returncode == -9


class Started:
    """A stand-in that is ready when the test says so, or fails."""

    made: list[Started]

    def __init__(self) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cancelled = self.stopped = False

    @classmethod
    async def start(
        cls, config: Config, report: Callable[[EngineWarming], None], spawned: Callable[[], None] = lambda: None
    ) -> Started:
        engine = cls()
        cls.made.append(engine)
        await asyncio.sleep(0)
        spawned()
        report(EngineWarming(what="compiling kernels", done=1, total=2, seconds_left=None))
        try:
            await engine.ready
        except asyncio.CancelledError:
            engine.cancelled = True
            raise
        return engine

    async def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    Started.made = []
    monkeypatch.setattr(engine_process, "EngineProcess", Started)
    return Started.made


def starts(folder: Path, tp: int = 1) -> tuple[EngineStarts, list[EngineWarming]]:
    reports = list[EngineWarming]()
    return EngineStarts(Config(data_dir=folder, tp=tp), reports.append), reports


async def test_the_engine_that_was_begun_is_the_first_one(made: list[Started], tmp_path: Path) -> None:
    engines, reports = starts(tmp_path)
    await engines.begin()
    assert len(made) == 1 and len(reports) == 1, "its process runs"
    made[0].ready.set_result(None)
    assert await engines.start() is made[0]
    second = asyncio.create_task(engines.start())
    await asyncio.sleep(0)
    made[1].ready.set_result(None)
    assert await second is made[1]
    await engines.close()
    assert not made[0].stopped, "the supervisor's from then on"


async def test_an_early_death_is_told_to_whoever_starts_it(made: list[Started], tmp_path: Path) -> None:
    engines, _ = starts(tmp_path)
    await engines.begin()
    made[0].ready.set_exception(EngineDied(-9))
    with pytest.raises(EngineDied):
        await engines.start()
    await engines.close()


async def test_a_start_that_is_cancelled_ends_the_engine_that_was_begun(made: list[Started], tmp_path: Path) -> None:
    engines, _ = starts(tmp_path)
    await engines.begin()
    starting = asyncio.create_task(engines.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    assert made[0].cancelled
    await engines.close()


@pytest.mark.parametrize("end", ["starting", "ready", "dead"])
async def test_an_engine_that_nobody_asked_for_is_ended(made: list[Started], tmp_path: Path, end: str) -> None:
    """As where the registry is damaged."""
    engines, _ = starts(tmp_path)
    await engines.begin()
    if end == "ready":
        made[0].ready.set_result(None)
    if end == "dead":
        made[0].ready.set_exception(EngineDied(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await engines.close()
    assert made[0].cancelled == (end == "starting")
    assert made[0].stopped == (end == "ready")


async def test_ranks_are_not_started_before_recovery(made: list[Started], tmp_path: Path) -> None:
    """They meet in the staging folder, which it empties."""
    engines, _ = starts(tmp_path, tp=2)
    await engines.begin()
    assert not made


SCRIPT = """
import asyncio, logging, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from coserve.core.errors import EngineFault
from coserve.engine.warming.fast_imports import fast_imports

with fast_imports():
    from coserve.engine.worker import run_to_exit

assert "torch._inductor.compile_fx" not in sys.modules, "a second for engines that compile no layers"

async def work(error):
    asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), time.sleep, 3600)
    await asyncio.sleep(0.1)
    if error:
        raise error

logging.basicConfig()
for error in (None, EngineFault("broken")):
    if not (child := os.fork()):
        run_to_exit(work(error))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_it_ends_without_waiting_for_a_thread_that_compiles() -> None:
    """By itself, and by an error; in two processes that one has imported for."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["0", "1"], done.stderr
    assert "EngineFault: broken" in done.stderr
