"""What a start imports, on a CPU: the daemon until its engine's process begins, that process, and the workers of a
warm-up.

    python -m benchmarks.start.imports [--tree FOLDER]

Each number is the median of some starts; with `--tree` the daemon and the engine's process are those of another
checkout, for a comparison. Wall time and CPU time: where other programs run, only the latter compares. No GPU: there
torch and its libraries take longer, and the kernels come after that.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results
from benchmarks.common.summary import update_summary
from benchmarks.serving.http_case import SMALL, model_folder
from coserve.config import Config, config_to_json
from coserve.core.processes import PARENT, usable_cores
from coserve.engine.warmup.parts import WarmUpTask
from coserve.engine.warmup.warm_up import ProcessWorker

FILE = "imports.json"
REPEATS = 7
WORKERS = 4
PART = "gemms-1"
"""A part of a warm-up that takes no time on a CPU but that of its base of few layers."""
NO_SOCKET = 0
"""The engine is given this descriptor, which is no socket, as its link: it ends with an error after its imports."""


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall time, and of CPU time of the processes that ended inside."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return time.perf_counter() - began, cpu


def start_engine(tree: Path, data: Path) -> None:
    """Run the imports of an engine's process of this checkout, which may cache bytecode in the data folder. Of the
    settings, only this and the device differ from the defaults."""
    environment = os.environ | {"PYTHONPATH": str(tree.absolute()), PARENT: str(os.getpid())}
    command = [sys.executable, "-P", "-m", "coserve.engine.process", str(NO_SOCKET)]
    settings = config_to_json(Config(device="cpu", data_dir=data))
    done = subprocess.run(command, input=settings, env=environment, capture_output=True, check=False)
    assert b"Socket operation on non-socket" in done.stderr, done.stderr.decode()


def begin_engine(tree: Path, model: Path) -> None:
    """Run a daemon of this checkout until it has started its engine's process, then kill both."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--data-dir", folder, "--device", "cpu", "--load-format", "dummy", "--port", "0"]
        command = [sys.executable, "-P", "-m", "coserve", "serve", str(model), *options]
        environment = os.environ | {"PYTHONPATH": str(tree.absolute())}
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as process:
            assert process.stderr is not None
            found = any(b"engine starts" in line for line in process.stderr)
            process.kill()  # the engine's process dies with it
        assert found, "expected the daemon to start its engine"


async def run_part(task: WarmUpTask) -> None:
    """A worker's start and its first part."""
    worker = await ProcessWorker.start(task, {})
    await worker.run(PART)
    while (report := await worker.report()).done < report.total:
        assert report.failure is None, report
    await worker.close()


async def run_parts(task: WarmUpTask) -> None:
    """In all workers at the same time."""
    await asyncio.gather(*(run_part(task) for _ in range(WORKERS)))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tree", type=Path, help="a checkout whose engine is measured, too")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    results = Results.of(
        options,
        FILE,
        __file__,
        {"repeats": options.repeats, "workers": WORKERS, "cores": usable_cores()},
        hardware=cpu_name(),
    )
    with tempfile.TemporaryDirectory() as folder:
        config = Config(device="cpu", lora_backend="grouped", data_dir=Path(folder))
        task = WarmUpTask(config_to_json(config).decode(), folder, {}, "shape", WORKERS)
        model = model_folder(Path(folder) / "model", SMALL)
        trees = {"": Path()} | ({} if options.tree is None else {".before": options.tree})
        works: dict[str, Callable[[], None]] = {}
        for name, tree in trees.items():
            works[f"start.engine_begins_s{name}"] = partial(begin_engine, tree, model)
            works[f"start.import_s{name}"] = partial(start_engine, tree, Path(folder) / f"data{name}")
        engines = {key: list[tuple[float, float]]() for key in works}
        for _ in range(options.repeats):  # in turns: other programs slow down all alike
            for key, work in works.items():
                engines[key].append(measured(work))
        workers = [measured(lambda: asyncio.run(run_parts(task))) for _ in range(max(1, options.repeats // 2))]
    for key, samples in (engines | {"start.workers_s": workers}).items():
        wall, cpu = ([each[at] for each in samples] for at in (0, 1))
        about = {"cpu_s": round(statistics.median(cpu), 2), "least_cpu_s": round(min(cpu), 2)}
        results.put(key, round(statistics.median(wall), 2), "s", None, wall, about)
    rows = json.loads((options.out / FILE).read_text())["rows"]
    found = {key: (row["cpu_s"], "s of CPU time", None, row) for key, row in rows.items()}
    update_summary(options.out, "start/imports.py", FILE, found)


if __name__ == "__main__":
    main()
