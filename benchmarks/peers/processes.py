"""The processes of a comparison: servers that are waited for, and the trainer whose steps are noted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from coserve.workloads.replay import JobSample

START_TIMEOUT = 600.0
POLL = 0.5
"""Seconds between two questions whether a server is ready: servers of others have no other way to say so."""
SHOWN = 40
"""Last lines of the log of a process that failed."""
FOUND = "FOUND "
READY_STEPS = 3
"""Optimizer steps after which the trainer's kernels are compiled."""


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str], *, piped: bool = False
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process and its children, which are ended with the block. Its output goes to `log`, whose end is shown if the
    block fails; if `piped`, standard output can be read."""
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if piped else errors,
            stderr=errors,
            env=os.environ | dict(environment),
            start_new_session=True,
        )
    try:
        yield process
    except BaseException:
        _show_end(log)
        raise
    finally:
        await _end(process)


def _show_end(log: Path) -> None:
    print(f"{log}:", *log.read_text(errors="replace").splitlines()[-SHOWN:], sep="\n", flush=True)


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            async with asyncio.timeout(30):
                await process.wait()
                break
        except TimeoutError:
            continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # children that outlive it keep the GPU's memory


def found_by(command: Sequence[str], environment: Mapping[str, str], limit: float) -> Iterator[dict[str, Any]]:
    """What a process prints after FOUND, as it comes; its other lines are printed again if it fails.

    Raises `ChildProcessError` if it fails or runs longer than `limit` seconds; it is killed then.
    """
    others = deque[str](maxlen=SHOWN)
    with subprocess.Popen(
        command,
        env=os.environ | dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        clock = threading.Timer(max(limit, 0.0), os.killpg, (process.pid, signal.SIGKILL))
        clock.start()
        try:
            for line in process.stdout:
                if line.startswith(FOUND):
                    yield json.loads(line.removeprefix(FOUND))
                else:
                    others.append(line)
            if code := process.wait():
                print("".join(others), flush=True)
                raise ChildProcessError(f"it ended with {code}")
        finally:
            clock.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


async def wait_ready(url: str, process: asyncio.subprocess.Process, log: Path, path: str = "/health") -> None:
    """Until `path` answers 200. Exits if the process ends before, or never gets ready."""
    began = time.monotonic()
    async with aiohttp.ClientSession() as session:
        while process.returncode is None and time.monotonic() - began < START_TIMEOUT:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url + path) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(POLL)
    raise SystemExit(f"the server did not start: {log}")


class _Step(msgspec.Struct):
    at: float
    tokens: int
    loss: float


@dataclass
class Trainer:
    """The steps that a trainer has reported: times on the monotonic clock, and tokens."""

    steps: list[tuple[float, int]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    commands: asyncio.StreamWriter | None = None

    def set_duty(self, duty: float) -> None:
        """From its next step on, the trainer pauses after each: it computes the share `duty` of the time."""
        assert self.commands is not None, "expected a trainer in a process of its own"
        self.commands.write(f"{duty}\n".encode())

    async def ready(self) -> None:
        """Until a few steps were reported. Exits if the trainer ends before."""
        while len(self.steps) < READY_STEPS:
            if self.ended:
                raise SystemExit("the trainer ended; see its log")
            self.changed.clear()
            await self.changed.wait()

    def job(self, start: float) -> JobSample:
        """What it trained after `start`, as one job."""
        trained = tuple((at - start, tokens) for at, tokens in self.steps if at >= start)
        return JobSample(
            index=0,
            adapter="peft",
            rows=0,
            due=0.0,
            sent=0.0,
            job="peft",
            trained=trained,
            state=None,
            error="ended" if self.ended else None,
        )


@contextlib.asynccontextmanager
async def training(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> AsyncIterator[Trainer]:
    """Run a trainer (`benchmarks.peers.trainer`) until the end of the block; it is ready when the block begins."""
    trainer = Trainer()
    async with running(command, log, environment, piped=True) as process:
        trainer.commands = process.stdin
        reading = asyncio.create_task(_read(process, trainer))
        try:
            await trainer.ready()
            yield trainer
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _read(process: asyncio.subprocess.Process, trainer: Trainer) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        step = msgspec.json.decode(line, type=_Step)
        trainer.steps.append((step.at, step.tokens))
        trainer.changed.set()
    trainer.ended = True
    trainer.changed.set()


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of this repository."""
    return [sys.executable, "-m", name, *arguments]
