"""Overhead of HTTP at a given engine speed: the API over a fake engine that sends 64 tokens a step.

    python -m benchmarks.serving.http_paced --out benchmarks/results

Needs no GPU. The fake engine runs in a process of its own, on the real link; its steps take as long as those of an 8B
base at the target speeds, so the tokens/s lost between it and the clients are the API's. The overhead inside the real
engine is measured by `benchmarks/serving/over_http.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results, summarize
from benchmarks.serving.http_case import SEED, TINY, Size, closed_loop_requests
from benchmarks.serving.http_daemon import load
from benchmarks.serving.http_report import HTTP_TARGET, closed_row
from coserve.api.app import make_app, make_runner
from coserve.api.service import Service
from coserve.config import Config
from coserve.core.gpu_memory import PoolShape
from coserve.core.link.channel import api_end, engine_end
from coserve.core.link.engine import EngineReady
from coserve.core.link.generation import Admitted, CancelRequest, Generate, Tokens
from coserve.core.types import BaseSpec, FinishReason
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.state.folder import DataFolder
from coserve.state.registry.registry import Registry
from coserve.state.thread import RegistryThread

FILE, STREAMS = "http_paced.json", 64
SPEEDS = (8500, 10431)
"""Output tokens a second of 64 sequences: with 32 adapters, and without."""


async def engine(fd: int, step: float) -> None:
    """A token for every running request each `step` seconds, in one write as the real engine's."""
    link = await engine_end(socket.socket(fileno=fd))
    left: dict[str, int] = {}

    async def read() -> None:
        while True:
            message = await link.receive()
            if isinstance(message, Generate):
                left[message.id] = message.sampling.max_tokens
                link.send(Admitted(id=message.id, at=time.monotonic()))
            elif isinstance(message, CancelRequest):
                left.pop(message.id, None)

    reading, due, token = asyncio.create_task(read()), time.monotonic(), 0
    while not reading.done():
        messages = []
        for id in tuple(left):
            left[id] -= 1
            token = (token + 7919) % 3000
            end = FinishReason.LENGTH if left[id] == 0 else None
            messages.append(Tokens(id=id, tokens=(1000 + token,), finished=end))
            if end is not None:
                del left[id]
        link.send_all(messages)
        due = max(due + step, time.monotonic())
        await asyncio.sleep(due - time.monotonic())


async def api(step: float, data: Path) -> None:
    """Serve until SIGTERM; prints the address."""
    ours, theirs = socket.socketpair()
    child = [
        sys.executable,
        "-m",
        "benchmarks.serving.http_paced",
        "--engine",
        str(theirs.fileno()),
        "--step",
        str(step),
    ]
    process = await asyncio.create_subprocess_exec(*child, pass_fds=(theirs.fileno(),))
    theirs.close()
    config, folder, tokenizer = Config(data_dir=data), DataFolder(data), Tokenizer.load("bundled")
    spec = BaseSpec(
        name="paced",
        fingerprint="paced",
        family="none",
        dtype="none",
        device="none",
        layers=0,
        hidden=0,
        vocab=tokenizer.vocab_size,
        context=8192,
        eos_token_ids=(0,),
        sites={},
        default_targets=(),
    )
    with folder.lock():
        service = Service(config, folder, RegistryThread(lambda: Registry(folder.database)), tokenizer)
        ready = EngineReady(
            spec=spec, kv_tokens=1 << 20, pool=PoolShape(1 << 16, 1 << 20, 16), lora_backend="none", notes=()
        )
        await service.attach(await api_end(ours), ready)
        runner = make_runner(make_app(service, config), config)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()
    process.kill()


def measure(speed: int, processes: int) -> dict[str, Any]:
    """One closed loop at a step of `STREAMS / speed` seconds."""
    config = TINY | {"vocab_size": 4096}
    size = Size(config, "cpu", streams=STREAMS, rounds=4, processes=processes)
    with tempfile.TemporaryDirectory() as data:
        child = [sys.executable, "-m", "benchmarks.serving.http_paced", "--data", data, "--step", str(STREAMS / speed)]
        process = subprocess.Popen(child, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        load(url, size, closed_loop_requests(size, 0, "warm"), closed=True)
        before = _cpu_seconds(process.pid)
        samples = load(url, size, closed_loop_requests(size, 0, "run"), closed=True)
        busy = _cpu_seconds(process.pid) - before
        process.terminate()
        process.wait()
    row = closed_row(samples, float(speed))
    seconds = max(sample.finished for sample in samples) - min(sample.sent for sample in samples)
    return row | {"api_cpu_share": round(busy / seconds, 3)}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--processes", type=int, default=1, help="that make the load")
    parser.add_argument("--step", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        asyncio.run(engine(options.engine, options.step))
        return
    if options.data is not None:
        asyncio.run(api(options.step, options.data))
        return
    results = Results.of(options, FILE, __file__, {"streams": STREAMS}, seed=SEED, hardware=cpu_name())
    rows = {f"{speed}_tok_s": measure(speed, options.processes) for speed in SPEEDS}
    overheads = [row["http_overhead"] for row in rows.values()]
    results.put("serving.http_overhead.paced", max(overheads), "fraction", HTTP_TARGET, overheads, rows)
    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
