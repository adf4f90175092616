"""Worker processes of a warm-up: real ones, which compile nothing; and the warm-up's own process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from coserve.config import Config, config_to_json
from coserve.core.link.channel import AsyncChannel, Channel
from coserve.core.link.link import PeerLost
from coserve.core.processes import spawn_child
from coserve.engine.warmup import warm_up
from coserve.engine.warmup.launch import MODULE
from coserve.engine.warmup.parts import Part, Progress, WarmUpTask
from coserve.engine.warmup.warm_up import DIED, ProcessWorker


async def start(folder: Path) -> ProcessWorker:
    task = WarmUpTask("{}", str(folder), {}, "8b", 1)
    return await ProcessWorker.start(task, {"ECHO": "set"}, "tests.support.echo_worker")


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_worker_runs_parts_one_after_another_and_is_gone_once_closed(tmp_path: Path) -> None:
    worker, said = await start(tmp_path), list[list[str]]()
    for part in ("a", "b"):
        await worker.run(part)
        said.append((await worker.report()).reason.split())
    pid = said[0][2]
    assert said == [["8b", part, pid, "set"] for part in ("a", "b")]
    assert not ended(int(pid))
    await worker.close()
    assert ended(int(pid))


@pytest.mark.parametrize("part", ["die", "odd"])
async def test_a_worker_that_dies_or_says_what_is_no_report_is_told(tmp_path: Path, part: str) -> None:
    worker = await start(tmp_path)
    await worker.run(part)
    async with asyncio.timeout(60):
        assert await worker.report() == DIED
        await worker.close()


async def test_a_worker_that_runs_a_part_is_killed(tmp_path: Path) -> None:
    worker = await start(tmp_path)
    await worker.run("a")
    pid = int((await worker.report()).reason.split()[2])
    os.kill(pid, signal.SIGSTOP)
    await worker.run("b")
    await worker.close()
    assert ended(pid)


async def test_the_process_of_an_engine_reports_until_all_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(task: WarmUpTask, report: warm_up.Report) -> None:
        await warm_up.compile_parts(task, (Part("a", 1), Part("b", 1)), lambda: start(tmp_path), report)

    monkeypatch.setattr(warm_up, "warm_up", work)
    monkeypatch.setattr(warm_up, "set_up_logging", lambda *_: None)
    ours, theirs = socket.socketpair()
    channel = await AsyncChannel[WarmUpTask, Progress].open(ours, msgspec.msgpack.Decoder(Progress))
    channel.send(WarmUpTask(config_to_json(Config()).decode(), str(tmp_path / "cache"), {}, "8b", 1))
    told = list[Progress]()
    async with asyncio.timeout(60):
        await warm_up.serve(theirs)
        with suppress(PeerLost):
            while True:
                told.append(await channel.receive())
    await channel.close()
    assert [(one.done, one.ended) for one in (told[0], told[-1])] == [(0, False), (2, True)]


def test_it_ends_with_the_engine(tmp_path: Path) -> None:
    config = Config(device="cpu", lora_backend="grouped", model=str(tmp_path / "nothing"))
    task = WarmUpTask(config_to_json(config).decode(), str(tmp_path), {}, "8b", 1)
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn_child(MODULE, theirs)
    channel = Channel[WarmUpTask, Progress](ours, msgspec.msgpack.Decoder(Progress))
    channel.send(task)
    assert channel.receive().done == 0
    channel.close()
    assert process.wait(60) == 0
