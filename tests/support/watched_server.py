"""The API over a fake engine in a process of its own, whose event loop is watched.

What is measured between two heartbeats of the loop is the CPU time of the whole process: work that holds the loop, or
the interpreter's lock from another thread, burns it; a busy machine, which takes the processor away, does not.

Commands come as lines on standard input, answers go as lines of JSON to standard output: `measure` gives the longest
gap since the last one, in seconds of CPU; `hold` has a thread hold the interpreter's lock, as the bugs did.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.api_server import serve_api, tokenizer

BEAT = 0.002
"""Seconds between heartbeats."""


class Heart:
    """Beats on the running loop. `longest`: most CPU seconds between two beats."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = time.process_time()
        self.longest = 0.0
        self._beat()

    def _beat(self) -> None:
        now = time.process_time()
        self.longest = max(self.longest, now - self._last)
        self._last = now
        self._loop.call_later(BEAT, self._beat)

    def take(self) -> float:
        found, self.longest = self.longest, 0.0
        return found


def unit() -> float:
    """CPU seconds of a fixed piece of work, about 10 ms on a machine of 2020: how slow this machine is now."""
    began = time.process_time()
    sum(number * number for number in range(120_000))
    return time.process_time() - began


async def serve(folder: Path) -> None:
    loop = asyncio.get_running_loop()
    root = folder / "root"
    root.mkdir()
    async with serve_api(folder / "data", data_root=root, read_timeout=60.0) as api:
        unit()
        slow = max(1.0, unit() / 0.010)
        print(json.dumps({"port": api.port, "slow": slow}), flush=True)
        heart = Heart()
        while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            if line == "hold":
                text = "the cat sat " * 40_000
                await loop.run_in_executor(None, tokenizer()._backend.encode, text)
            print(json.dumps({"longest": heart.take()}), flush=True)


class Watched:
    """The server's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        ready = self._read()
        self.port, self.slow = int(ready["port"]), float(ready["slow"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def ask(self, command: str) -> float:
        """`measure` or `hold`: the longest gap, in milliseconds of CPU on a machine of usual speed."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return 1000 * float(self._read()["longest"]) / self.slow


@contextmanager
def watched_server(folder: Path) -> Iterator[Watched]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.watched_server", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        try:
            yield Watched(process)
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
