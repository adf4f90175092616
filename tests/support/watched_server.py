"""The API over a fake engine in a process of its own, whose event loop is watched.

What is measured between two heartbeats of the loop is the CPU time of the whole process: work that holds the loop, or
the interpreter's lock from another thread, burns it; a busy machine, which takes the processor away, does not.

Commands come as lines on standard input, answers go as lines of JSON to standard output: `measure` gives the longest
gap since the last one, in seconds of CPU, and how many times slower this machine is now than a usual one; `hold` has a
thread hold the interpreter's lock, as the bugs did.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from coserve.core.garbage import freeze_and_collect_young
from coserve.core.link.engine import EngineReady
from coserve.core.link.generation import MAX_PROMPT_LOGPROBS, Admitted, Generate, Tokens
from coserve.core.logprobs import PackedLogprobs, TokenLogprob
from coserve.core.schemas.jobs import JobEvent
from coserve.core.training.jobs import JobState
from coserve.core.types import FinishReason
from coserve.state.folder import DataFolder
from tests.support.api_server import serve_api
from tests.support.fake_engine import FakeEngine
from tests.support.heart import Heart
from tests.support.records import make_adapter, make_job, make_metrics
from tests.support.tokenizers import byte_level

CONTEXT = 32_768
TOKEN = 300
RUNNING, TOGETHER = 32, 16
"""Sequences that the engine runs at once, and tokens that it sends in a message."""
ADAPTERS, JOBS, EVENTS = 10_000, 250, 100_000
OLD_JOB = "job-old"


class ScoringEngine(FakeEngine):
    """As many tokens as were asked for, each with as many log-probabilities, `TOGETHER` in a message."""

    @property
    def ready(self) -> EngineReady:
        return msgspec.structs.replace(super().ready, kv_tokens=CONTEXT)

    async def answer(self, request: Generate) -> None:
        self._turns = getattr(self, "_turns", None) or asyncio.Semaphore(RUNNING)
        async with self._turns:
            sampling, id = request.sampling, request.id
            self.link.send(Admitted(id=id, at=time.monotonic()))
            if sampling.prompt_logprobs is not None:
                score = PackedLogprobs.of([_score(sampling.prompt_logprobs)])
                for first in range(1, len(request.prompt), MAX_PROMPT_LOGPROBS):
                    some = [score] * min(MAX_PROMPT_LOGPROBS, len(request.prompt) - first)
                    self.link.send(Tokens(id=id, tokens=(), prompt_logprobs=PackedLogprobs.joined(some)))
            scored = PackedLogprobs() if sampling.logprobs is None else PackedLogprobs.of([_score(sampling.logprobs)])
            left = min(sampling.max_tokens, CONTEXT - len(request.prompt))
            while True:
                count = min(left, TOGETHER)
                left -= count
                finished = None if left else FinishReason.LENGTH
                logprobs = PackedLogprobs.joined([scored] * count)
                self.link.send(Tokens(id=id, tokens=(TOKEN,) * count, logprobs=logprobs, finished=finished))
                await asyncio.sleep(0)
                if finished:
                    return


def _score(top: int) -> TokenLogprob:
    return TokenLogprob(-0.5, tuple((TOKEN + place, -0.5 - place) for place in range(top)))


def fill(folder: DataFolder, *, adapters: int, jobs: int, events: int) -> None:
    """Rows of so many adapters and queued jobs, and of one that has ended, `OLD_JOB`, with so many events."""
    encode = msgspec.msgpack.encode
    made = (replace(make_adapter(f"adapter-{number:05}"), base_fingerprint="f" * 16) for number in range(adapters))
    queued = [replace(make_job(f"job-{number}", f"a-{number}"), base_fingerprint="other") for number in range(jobs)]
    queued.append(replace(make_job(OLD_JOB, "old"), state=JobState.CANCELLED))
    story = (
        JobEvent(
            seq=seq,
            job=OLD_JOB,
            created_at=1.0,
            level="info",
            type="metrics",
            message="step",
            metrics=make_metrics(seq),
        )
        for seq in range(1, events + 1)
    )
    with closing(sqlite3.connect(folder.database)) as db, db:
        db.executemany("INSERT INTO adapters VALUES (?, ?, ?)", ((a.ref.id, 1, encode(a)) for a in made))
        db.executemany(
            "INSERT INTO jobs (id, state, record) VALUES (?, ?, ?)", ((j.spec.id, j.state, encode(j)) for j in queued)
        )
        db.executemany(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?)", ((e.job, e.seq, e.type, e.seq, encode(e)) for e in story)
        )


async def serve(folder: Path) -> None:
    loop = asyncio.get_running_loop()
    root = folder / "root"
    root.mkdir()
    async with serve_api(
        folder / "data",
        data_root=root,
        read_timeout=60.0,
        engine_type=ScoringEngine,
        context=CONTEXT,
        max_queue=4096,
        max_jobs=2 * JOBS,
    ) as api:
        fill(api.folder, adapters=ADAPTERS, jobs=JOBS, events=EVENTS)
        freeze_and_collect_young()  # as the daemon does
        print(json.dumps({"port": api.port}), flush=True)
        heart, holder = Heart(), byte_level()
        while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            if line == "hold":
                text = "the cat sat " * 120_000
                await loop.run_in_executor(None, holder.encode, text)  # one native call that keeps the lock
            print(json.dumps(heart.take()), flush=True)


class Watched:
    """The server's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.port = int(self._read()["port"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def ask(self, command: str) -> float:
        """`measure` or `hold`: the longest gap, in milliseconds of CPU on a machine of usual speed."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        found = self._read()
        return 1000 * float(found["longest"]) / float(found["slow"])


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
