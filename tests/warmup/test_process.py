"""The warm-up's process, with workers that compile nothing."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest

from coserve.warmup.fork_client import ANEW, ForkServer
from coserve.warmup.messages import Progress, WarmUpTask
from coserve.warmup.parts import Part
from coserve.warmup.process import run


async def warm_up(folder: Path) -> list[Progress]:
    """What the process reports of two parts."""
    task = WarmUpTask("", str(folder), {}, "shape", 1)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    async with asyncio.timeout(60):
        await run(task, (Part("a", 1), Part("b", 1)), theirs, ForkServer(task, "tests.support.fork_echo"))
        lines = (await reader.read()).splitlines()
    writer.close()
    return [msgspec.json.decode(line, type=Progress) for line in lines]


async def test_progress_is_reported_until_the_end(tmp_path: Path) -> None:
    told = await warm_up(tmp_path)
    assert [progress.complete for progress in (told[0], told[-1])] == [[], ["a", "b"]]
    assert told[-1].ended and not told[-1].notes


async def test_workers_that_cannot_be_forked_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_ANEW", "1")
    told = await warm_up(tmp_path)
    assert told[-1].ended and told[-1].notes == [ANEW] and not told[-1].failed
