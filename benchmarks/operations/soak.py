"""Memory and descriptors under mixed load with churn: `page.soak.rss_growth`.

    python -m benchmarks.operations.soak --minutes 30 --out benchmarks/results

Generations, cancelled streams, imports and deletions of adapters, jobs from start to deletion, uploads, schemas that
are all different, an open page, and bad requests run side by side. Every few seconds the resident memory and the open
descriptors of all processes of the daemon are read. The growth compares the median of the last third with that of the
middle third: the first one fills caches.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results, Target, summarize
from benchmarks.operations.load import Load, for_seconds, job
from tests.support.daemon_process import DaemonProcess
from tests.support.model_folder import make_model_folder

FILE, KEY, SEED = "soak.json", "page.soak.rss_growth", 0
TARGET = Target(0.02, most=True)
INTERVAL = 5.0


def reading(session: int) -> dict[str, float]:
    """Resident bytes and descriptors of the processes of a session."""
    found = {"rss": 0.0, "fds": 0.0, "processes": 0.0}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if os.getsid(int(folder.name)) == session:
                pages = int((folder / "statm").read_text().split()[1])
                fds = sum(1 for _ in (folder / "fd").iterdir())
                found = {
                    "rss": found["rss"] + pages * os.sysconf("SC_PAGE_SIZE"),
                    "fds": found["fds"] + fds,
                    "processes": found["processes"] + 1,
                }
    return found


def growth(values: list[float]) -> float:
    """Median of the last third over that of the middle third, minus 1."""
    third = len(values) // 3
    return statistics.median(values[-third:]) / statistics.median(values[third:-third]) - 1


async def soak(daemon: DaemonProcess, adapter: Path, seconds: float) -> tuple[list[dict[str, float]], dict[str, int]]:
    began, readings = time.monotonic(), list[dict[str, float]]()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        load = Load(daemon.url, http, adapter, random.Random(SEED))
        actions = [load.generate, load.generate, load.cancelled_stream, load.adapter, load.job, load.file, load.schema]

        async def read() -> None:
            while True:
                await asyncio.sleep(INTERVAL)
                readings.append(reading(daemon.process.pid) | {"at": round(time.monotonic() - began, 1)})

        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(read())
            await for_seconds(load.run([*actions, load.bad, load.page]), seconds)
            reader.cancel()
        assert (await load.call("GET", "/health"))[0] == 200
    return readings, dict(load.done)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", type=Path, help="a base; default: a tiny random one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = options.model or make_model_folder(root / "model")
        with DaemonProcess(model, root / "data", data_root=root) as daemon:
            daemon.wait_ready()
            _, made = daemon.call("POST", "/finetune", job("first"))
            assert list(daemon.events("GET", f"/finetune/{made['id']}/events"))[-1]["state"] == "succeeded"
            readings, done = asyncio.run(soak(daemon, root / "data" / "adapters" / "first" / "1", 60 * options.minutes))
            assert daemon.stop() == 0
    rss = growth([each["rss"] for each in readings])
    about: dict[str, Any] = {
        "minutes": options.minutes,
        "actions": done,
        "fd_growth": round(growth([each["fds"] for each in readings]), 4),
        "readings": readings,
        "note": f"{options.minutes:g} minutes on {cpu_name()}",
    }
    settings = {"model": str(options.model or "tiny"), "interval": INTERVAL}
    results = Results.of(options, FILE, __file__, settings, seed=SEED, hardware=cpu_name())
    results.put(KEY, round(rss, 4), "ratio", TARGET, about=about)
    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
