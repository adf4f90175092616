"""Serving over HTTP: the daemon under closed-loop and Poisson load, with and without a fine-tuning job.

    python -m benchmarks.serving.over_http --out benchmarks/results
    python -m benchmarks.serving.over_http --tiny --out /tmp/tried

The Llama-3.1-8B shape with random weights (`--load-format dummy`); adapters of rank 16 on all seven sites of a layer,
imported through the API. First the closed loop in process, through an engine of the same settings in a process of its
own (what HTTP costs is counted against it), then the daemon. Greedy, every request to its last token. Each part is
written as soon as it is measured; parts of earlier runs stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results
from benchmarks.serving.http_case import (
    ADAPTERS,
    FULL,
    RANK,
    SEED,
    SMALL,
    Size,
    adapter_folders,
    closed_loop_requests,
    corpus,
    model_folder,
    poisson_requests,
)
from benchmarks.serving.http_daemon import Offline, daemon, import_adapter, load, offline, serve_arguments, soon
from benchmarks.serving.http_report import FILE, closed_row, online_row, summarize
from coserve.client import Client
from coserve.core.training.settings import TrainingSettings

WATCH_INTERVAL = 0.05
"""Seconds between two polls of a job."""


def beside_training(client: Client, size: Size, url: str, rate: float) -> dict[str, Any]:
    """Online load while one job fine-tunes; its tokens a second while requests arrive."""
    training = TrainingSettings(
        steps=10_000, batch_tokens=size.batch_tokens, max_length=size.row_tokens, checkpoint_steps=10_000, seed=SEED
    )
    job = client.finetune(f"trained-{rate:g}", corpus(size), lora={"r": RANK}, training=msgspec.to_builtins(training))
    waited = time.monotonic()
    while client.job(job.id).info.step < 2 and time.monotonic() - waited < 60:  # the kernels are compiled
        time.sleep(0.2)
    requests = poisson_requests(size, rate)
    start = soon()
    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(watch_training, client, job.id, start, start + size.seconds)
        samples = load(url, size, requests, closed=False, start=start)
        trained = watcher.result()
    info = client.job(job.id).cancel()
    return online_row(rate, size.seconds, samples) | trained | {"steps": info.step}


def watch_training(client: Client, job: str, start: float, end: float) -> dict[str, float]:
    """Tokens a second that a job was trained on between two times of the monotonic clock, and its longest time without
    a step."""
    time.sleep(max(0.0, start - time.monotonic()))
    first = info = client.job(job).info
    began = stepped = time.monotonic()
    longest = 0.0
    while (now := time.monotonic()) < end:
        time.sleep(WATCH_INTERVAL)
        found = client.job(job).info
        if found.step != info.step:
            stepped = now
        longest = max(longest, now - stepped)
        info = found
    tokens = (info.trained_tokens - first.trained_tokens) / (time.monotonic() - began)
    return {"finetune_tok_s": round(tokens, 1), "longest_step_gap_s": round(longest, 2)}


class HttpBenchmark:
    """The parts of the benchmark; each result is written as soon as it is measured."""

    def __init__(self, size: Size, results: Results, *, budget: float) -> None:
        self._size, self._results = size, results
        self._began, self._budget = time.monotonic(), budget
        self.offline: dict[str, float] = {}

    def log(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {what}", flush=True)

    def in_process(self, process: Offline) -> None:
        self.offline = process.measure()
        for adapters, tok_s in self.offline.items():
            self._results.put(f"offline.{adapters}", tok_s, "output tok/s")
        self.log("offline measured")

    def closed(self, url: str, adapters: int) -> None:
        load(url, self._size, closed_loop_requests(self._size, adapters, "warm"), closed=True)
        samples = load(url, self._size, closed_loop_requests(self._size, adapters, "run"), closed=True)
        row = closed_row(samples, self.offline.get(f"a{adapters}"))
        self._results.put(f"closed.a{adapters}", row["tok_s"], "output tok/s", about=row)
        self.log(f"closed loop, {adapters} adapters: {json.dumps(row)}")

    def arrivals(self, client: Client, url: str, kind: str, rate: float) -> None:
        """Poisson arrivals, without (`online`) or with (`beside`) a fine-tuning job."""
        size = self._size
        needed = 2 * size.seconds + (30 if kind == "beside" else 0)
        if time.monotonic() - self._began > self._budget - needed:
            self.log(f"no time left for {kind}, {rate:g} requests/s")
            return
        if kind == "beside":
            row = beside_training(client, size, url, rate)
        else:
            row = online_row(rate, size.seconds, load(url, size, poisson_requests(size, rate), closed=False))
        self._results.put(f"{kind}.r{rate:g}", row["goodput_5s_45ms"], "requests/s in 5 s and 45 ms", about=row)
        self.log(f"{kind}, {rate:g} requests/s: {json.dumps(row)}")


def rates(text: str | None, default: tuple[float, ...]) -> list[float]:
    return list(default) if text is None else [float(part) for part in text.split(",") if part]


def order(online: list[float], beside_training: list[float]) -> list[tuple[str, float]]:
    """Order of the runs: two rates without training, the rates with training, the other rates."""
    first = [("online", rate) for rate in online[:2]] + [("beside", rate) for rate in beside_training]
    return [*first, *(("online", rate) for rate in online[2:])]


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, tiny="a small base, on any machine, to try the script")
    parser.add_argument("--offline", type=Path, help=argparse.SUPPRESS)
    add_names(parser, "--skip", ("offline", "closed"), default=(), what="parts to leave out")
    parser.add_argument("--online", default=None, help="rates without training, separated by commas; '' for none")
    parser.add_argument("--beside", default=None, help="rates with a fine-tuning job; '' for none")
    parser.add_argument("--scratch", type=Path, default=None, help="folder for the base, the adapters and the data")
    parser.add_argument("--seconds", type=float, default=None, help="of arrivals")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no arrivals are begun")
    return parser.parse_args()


def measure(run: HttpBenchmark, options: argparse.Namespace, size: Size, root: Path) -> None:
    skip = options.skip
    model = model_folder(root / "model", size)
    adapter_folders(root / "adapters", size.config)
    run.log("folders made")
    process = None if "offline" in skip else Offline(root, tiny=options.tiny)
    settings = serve_arguments(size, model, root / "data") | {"data_root": root / "adapters"}
    with daemon(settings, root / "daemon.log") as url, Client(url) as client:
        run.log(f"daemon up: {client.health().notes}")
        for i in range(ADAPTERS):
            import_adapter(url, f"a{i:02d}")
        run.log("adapters imported")
        if process is not None:
            run.in_process(process)
        for adapters in () if "closed" in skip else (0, ADAPTERS):
            run.closed(url, adapters)
        for kind, rate in order(rates(options.online, size.rates), rates(options.beside, size.beside)):
            run.arrivals(client, url, kind, rate)


def main() -> None:
    options = parse()
    size = SMALL if options.tiny else FULL
    size = size if options.seconds is None else replace(size, seconds=options.seconds)
    if options.offline is not None:
        asyncio.run(offline(size, options.offline / "model", options.offline))
        return
    results = Results.of(
        options,
        FILE,
        __file__,
        {name: value for name, value in vars(size).items() if name != "config"} | {"rank": RANK},
        seed=SEED,
    )
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        measure(HttpBenchmark(size, results, budget=options.budget), options, size, Path(scratch))
    summarize(options.out)


if __name__ == "__main__":
    main()
