"""The daemon under load, and the same engine without HTTP, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.serving.http_case import ADAPTERS, Size, closed_loop_requests
from benchmarks.serving.http_load import NEVER, LoadPlan, LoadRequest
from coserve.workloads.replay import Sample

LOG_LINES = 60
"""Lines that are printed of the log of a daemon that has ended by itself."""


def serve_arguments(size: Size, model: Path, data: Path) -> dict[str, Any]:
    """Settings of the daemon, and of the engine that is measured in process."""
    return {
        "model": model,
        "data_dir": data,
        "load_format": "dummy",
        "device": size.device,
        "kv_tokens": size.kv_tokens,
        "step_tokens": size.step_tokens,
        "max_running": size.max_running,
        "micro_batch_tokens": size.batch_tokens,
        "policy": "slack",
        # Below the limits that are counted (5 s, 45 ms): the policy lets TPOT reach its target.
        "slo_ttft": 1.0,
        "slo_tpot": 0.04,
    }


def daemon(settings: Mapping[str, object], log: Path, **environment: str) -> contextlib.AbstractContextManager[str]:
    """Run a daemon without a prefix cache: see `serving`."""
    given = {"port": 0} | dict(settings)
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return serving([*options, "--no-prefix-cache"], log, environment)


@contextlib.contextmanager
def serving(options: Sequence[str], log: Path, environment: Mapping[str, str] = {}) -> Iterator[str]:
    """Run a daemon with these options; yields its URL. Its log goes to `log`, whose last lines are printed at the end:
    many, if the daemon has ended by itself."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "coserve", "serve", *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | environment,
        )
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "listens on" in line), None)
            if line is None:
                raise SystemExit(f"the daemon did not start:\n{log.read_text()[-3000:]}")
            yield line.split()[-1]
        finally:
            ended = process.poll()
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            what = "the daemon's" if ended is None else f"the daemon had ended with {ended}; its"
            lines = log.read_text().splitlines()[-6 if ended is None else -LOG_LINES :]
            print(f"{what} last log lines:", *lines, sep="\n  ", flush=True)


def import_adapter(url: str, name: str) -> None:
    """From the folder of that name under the daemon's `data_root`."""
    body = json.dumps({"name": name, "path": name}).encode()
    request = urllib.request.Request(f"{url}/adapters", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def soon() -> float:
    """A time on the monotonic clock at which load processes started now are ready."""
    return time.monotonic() + 3.0


class LoadProcesses:
    """Load processes that were started ahead and wait for their plans: they take a second until they can send."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-m", "benchmarks.serving.http_load"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)
        ]

    def run(
        self,
        url: str,
        requests: Sequence[LoadRequest],
        *,
        start: float,
        streams: int | None = None,
        until: float = NEVER,
    ) -> list[Sample]:
        """Send all requests from `start` (monotonic clock) on. `streams`: of a closed loop, over all processes;
        `until`: see `LoadPlan`."""
        count = len(self._processes)
        each = None if streams is None else streams // count
        for i, process in enumerate(self._processes):
            plan = LoadPlan(url=url, start=start, requests=list(requests[i::count]), streams=each, until=until)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(plan))
            process.stdin.close()
        samples: list[Sample] = []
        for process in self._processes:
            assert process.stdout is not None
            samples += msgspec.json.decode(process.stdout.read(), type=list[Sample])
            process.wait()
        return sorted(samples, key=lambda sample: sample.index)


def load(
    url: str, size: Size, requests: Sequence[LoadRequest], *, closed: bool, start: float | None = None
) -> list[Sample]:
    """Run the load processes, which all start sending at `start`; returns their samples."""
    start = soon() if start is None else start
    return LoadProcesses(size.processes).run(url, requests, start=start, streams=size.streams if closed else None)


async def offline(size: Size, model: Path, root: Path) -> None:
    """Run the closed loops without HTTP; prints one line of JSON for each."""
    from coserve.config import Config
    from coserve.core.link.engine import Shutdown
    from coserve.core.link.generation import Generate, RequestFailed, Tokens
    from coserve.core.link.link import FromEngine
    from coserve.core.sampling import SamplingParams
    from coserve.core.types import AdapterRef, Slo
    from coserve.engine.worker import build_engine
    from coserve.model.load import load_base
    from coserve.state.folder import DataFolder
    from tests.support.local_link import local_pair

    config = Config(**serve_arguments(size, model, root / "offline"), prefix_cache=False)
    for i in range(ADAPTERS):
        copy = DataFolder(config.data_dir).adapter(AdapterRef(f"a{i:02d}", 1))
        shutil.copytree(root / "adapters" / f"a{i:02d}", copy, copy_function=os.link)
    base = load_base(str(model), device=size.device, dtype="auto", load_format="dummy")
    api, theirs = local_pair()
    engine, ready = build_engine(base, config, theirs)
    print(json.dumps({"notes": ready.notes}), flush=True)
    sys.stdin.readline()
    running = asyncio.create_task(engine.run())
    sampling = SamplingParams(max_tokens=size.output, temperature=0.0, ignore_eos=True)
    for adapters, run in ((0, "warm"), (0, "run"), (ADAPTERS, "warm"), (ADAPTERS, "run")):
        requests = closed_loop_requests(size, adapters, run)
        began, tokens, ended, sent = time.monotonic(), 0, 0, 0
        while ended < len(requests):
            while sent < len(requests) and sent - ended < size.streams:
                request = requests[sent]
                ref = AdapterRef(request.adapter, 1) if request.adapter else None
                id, slo = f"{adapters}/{run}/{sent}", Slo(ttft=3600.0, tpot=3600.0)
                api.send(Generate(id=id, prompt=tuple(request.prompt), sampling=sampling, adapter=ref, slo=slo))
                sent += 1
            message: FromEngine = await api.receive()
            assert not isinstance(message, RequestFailed), message
            if isinstance(message, Tokens):
                tokens += len(message.tokens)
                ended += message.finished is not None
        row = {"adapters": adapters, "run": run, "tok_s": round(tokens / (time.monotonic() - began), 1)}
        print(json.dumps(row), flush=True)
    api.send(Shutdown())
    await running


class Offline:
    """The process of `offline`: it loads while the daemon starts, and measures when told."""

    def __init__(self, root: Path, *, tiny: bool) -> None:
        command = [sys.executable, "-m", "benchmarks.serving.over_http", "--offline", str(root), "--out", str(root)]
        self._process = subprocess.Popen(
            [*command, "--tiny"] if tiny else command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self) -> dict[str, float]:
        """Output tokens a second by adapters. Raises `CalledProcessError` where the process failed."""
        out, _ = self._process.communicate("go\n")
        if self._process.returncode:
            raise subprocess.CalledProcessError(self._process.returncode, self._process.args)
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        print("offline", rows, flush=True)
        return {f"a{row['adapters']}": row["tok_s"] for row in rows if row.get("run") == "run"}
