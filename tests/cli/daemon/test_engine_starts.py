"""How the engine process starts and ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coserve.cli.daemon import engine_starts
from coserve.cli.daemon.engine_process import EngineDied
from coserve.cli.daemon.engine_starts import EngineStarts
from coserve.config import Config
from coserve.core.link.engine import EngineWarming


class Engine:
    """A stand-in that is ready when the test says so, or fails."""

    made: list[Engine]

    def __init__(self) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cancelled = self.stopped = False

    @classmethod
    async def start(
        cls, config: Config, report: Callable[[EngineWarming], None], spawned: Callable[[], None] = lambda: None
    ) -> Engine:
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
def made(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    Engine.made = []
    monkeypatch.setattr(engine_starts, "EngineProcess", Engine)
    return Engine.made


def starts(folder: Path, tp: int = 1) -> tuple[EngineStarts, list[EngineWarming]]:
    reports = list[EngineWarming]()
    return EngineStarts(Config(data_dir=folder, tp=tp), reports.append), reports


async def test_the_engine_that_was_begun_is_the_first_one(made: list[Engine], tmp_path: Path) -> None:
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


async def test_an_early_death_is_told_to_whoever_starts_it(made: list[Engine], tmp_path: Path) -> None:
    engines, _ = starts(tmp_path)
    await engines.begin()
    made[0].ready.set_exception(EngineDied(-9))
    with pytest.raises(EngineDied):
        await engines.start()
    await engines.close()


async def test_a_start_that_is_cancelled_ends_the_engine_that_was_begun(made: list[Engine], tmp_path: Path) -> None:
    engines, _ = starts(tmp_path)
    await engines.begin()
    starting = asyncio.create_task(engines.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    assert made[0].cancelled
    await engines.close()


@pytest.mark.parametrize("end", ["starting", "ready", "dead"])
async def test_an_engine_that_nobody_asked_for_is_ended(made: list[Engine], tmp_path: Path, end: str) -> None:
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


async def test_ranks_are_not_started_before_recovery(made: list[Engine], tmp_path: Path) -> None:
    """They meet in the staging folder, which it empties."""
    engines, _ = starts(tmp_path, tp=2)
    await engines.begin()
    assert not made


SCRIPT = """
import asyncio, logging, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from coserve.core.errors import EngineFault
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
