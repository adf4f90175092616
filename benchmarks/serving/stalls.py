"""Latency while the daemon starts, while jobs come and go, and beside imports and cancelled requests.

    python -m benchmarks.serving.stalls --only start.cold,start.warm --out benchmarks/results
    python -m benchmarks.serving.stalls --tp 4 --only start.cold,start.warm --out benchmarks/results
    python -m benchmarks.serving.stalls --scratch /tmp/stalls --only start.cold --budget 150 --out benchmarks/results
    python -m benchmarks.serving.stalls --scratch /tmp/stalls --policy overlap --only jobs.r5,jobs.r20 --budget 110 \
        --out benchmarks/results
    python -m benchmarks.serving.stalls --tiny --out /tmp/tried

The Llama-3.1-8B shape with random weights, 32 adapters of rank 16 that the data folder holds before the start, default
settings; Poisson arrivals over HTTP from processes of their own. Parts, in this order:

start.cold  the compilers' caches are empty: seconds until the daemon is ready; then latency in the first 30 s, jobs
aside start.warm  the same with filled caches
jobs.r5, jobs.r20  beside two jobs at a time that start, validate, checkpoint and publish; then the same arrivals beside
the same jobs without checkpoints churn       beside 64 imports, 200 cancelled requests and a reader that stops reading

Parts after `start.cold` need its caches: name the same `--scratch` if it was an earlier command. Parts after
`start.warm` share its daemon. Each result is written as soon as its part is done; results of earlier runs stay. Keys of
a `--policy` or of `--tp N` have that after their first part, as in `stall.overlap.jobs.ft_cost` and
`start.tp4.cold.ready_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results, summarize
from benchmarks.serving.http_case import FIRST_TOKEN, FULL, RANK, SEED, SMALL, Size, poisson_requests
from benchmarks.serving.http_daemon import LoadProcesses, daemon
from benchmarks.serving.http_load import LoadRequest
from benchmarks.serving.stall_churn import churn
from benchmarks.serving.stall_data import Folders
from benchmarks.serving.stall_jobs import Block, training_jobs
from benchmarks.serving.stall_report import (
    FILE,
    allocations,
    check_answers,
    cost,
    key_of,
    latency,
    stalls,
    target,
    timeline,
    worst,
)
from coserve.client import Client
from coserve.core.training.settings import TrainingSettings

PARTS = ("start.cold", "start.warm", "jobs.r5", "jobs.r20", "churn")
RATE = 5.0
SECONDS = {"start.cold": 30.0, "start.warm": 30.0, "jobs.r5": 80.0, "jobs.r20": 80.0, "churn": 30.0}
"""Of arrivals."""
CLIENTS = 2
LEAD = 0.3
"""Seconds from a plan's sending to its first request."""
TAIL = 15.0
"""Seconds kept for the last requests of a part, and for the daemon's end."""
SLO = {"slo_ttft": 1.0, "slo_tpot": 0.04}
ACTIVE_JOBS, JOB_STEPS, CHECKPOINT_STEPS, EVAL_STEPS = 2, 8, 3, 4
BLOCKS = (CHECKPOINT_STEPS, 10 * JOB_STEPS, 10 * JOB_STEPS, CHECKPOINT_STEPS)
"""Steps between checkpoints in each quarter of a part beside jobs; in this order a drift of the machine is the same for
both kinds."""


@dataclasses.dataclass(frozen=True)
class Daemon:
    """A daemon that is ready. Times are of the monotonic clock."""

    url: str
    began: float
    """The process's start."""
    ready: float
    """Until then the daemon answers 503."""

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as page:
            return str(page.read(), "utf-8")

    def notes(self) -> list[str]:
        """Of `/health`: what failed."""
        with urllib.request.urlopen(f"{self.url}/health", timeout=30) as page:
            return [str(note) for note in json.load(page)["notes"]]


class Stalls:
    """The parts of the benchmark. Each writes its results."""

    def __init__(
        self, size: Size, folders: Folders, results: Results, *, budget: float, policy: str | None = None, tp: int = 1
    ) -> None:
        """`budget`: seconds of each part, of the jobs' without the time until the daemon is ready; `policy`: None: the
        daemon's default."""
        self._size, self._folders, self._results = size, folders, results
        self._budget, self._policy, self._tp = budget, policy, tp
        self._kind = ".".join(([] if policy is None else [policy]) + ([] if tp == 1 else [f"tp{tp}"])) or None
        """Of the keys."""
        self._daemon: Daemon | None = None
        self._stack = contextlib.ExitStack()
        earlier = results.row(key_of("stall.jobs.max_gap_ms", self._kind))
        self._jobs: dict[str, dict[str, Any]] = {} if earlier is None else earlier["rates"]
        self._zero = time.monotonic()

    def log(self, text: str) -> None:
        print(f"{time.monotonic() - self._zero:6.1f} s  {text}", flush=True)

    def run(self, part: str) -> None:
        self.log(f"{part} begins")
        if part.startswith("start."):
            self._start(part, time.monotonic() + self._budget)
        else:
            found = self._warmed()
            end = time.monotonic() + self._budget
            if part == "churn":
                self._churn(found, end)
            else:
                self._beside_jobs(found, float(part.removeprefix("jobs.r")), end)
        self.log(f"{part} done")

    def close(self) -> None:
        """End the daemon."""
        self._stack.close()
        self._daemon = None

    # ---- the daemon

    def _open(self) -> Daemon:
        """The running daemon, or a new one on the caches that there are."""
        if self._daemon is None:
            settings: dict[str, object] = {"model": self._folders.model, "data_dir": self._folders.data}
            settings |= {"data_root": self._folders.adapters, "load_format": "dummy", "device": self._size.device}
            if self._policy is not None:
                settings["policy"] = self._policy
            settings |= {"cache_dir": self._folders.caches / "coserve", "tp": self._tp}
            began = time.monotonic()
            running = daemon(settings, self._folders.log, **self._folders.environment())
            url = self._stack.enter_context(running)
            self._daemon = Daemon(url, began, time.monotonic())
            self.log(f"ready after {self._daemon.ready - began:.1f} s")
        return self._daemon

    def _warmed(self) -> Daemon:
        if not self._folders.warm():
            raise SystemExit(
                "this part needs the caches and adapters of start.cold: run that first, or name its --scratch"
            )
        return self._open()

    # ---- the parts

    def _start(self, part: str, end: float) -> None:
        self.close()
        if part == "start.cold":
            self._folders.empty()
        elif not self._folders.warm():
            raise SystemExit("start.warm needs the caches of start.cold: run that first, or name its --scratch")
        clients = LoadProcesses(CLIENTS)
        found = self._open()
        seconds = self._seconds(part, end)
        start = found.ready + LEAD
        samples = clients.run(found.url, self._requests(RATE, seconds), start=start)
        check_answers(samples)
        row = latency(samples) | {"seconds": seconds, "stalls": stalls("", found.metrics())}
        notes = found.notes()
        self._put(f"{part}.ready_s", round(found.ready - found.began, 2), "s", {"notes": notes})
        self._put(f"{part}.ttft_p99_ms", row["ttft_p99_ms"], "ms")
        lines = timeline(samples, start - found.began)
        self._put(f"{part}.max_gap_ms", row["max_gap_ms"], "ms", row | {"timeline": lines})

    def _beside_jobs(self, found: Daemon, rate: float, end: float) -> None:
        """Blocks with the same arrivals and lengths beside jobs with and without checkpoints. Latency is that of
        requests beside jobs with checkpoints."""
        seconds = self._seconds(f"jobs.r{rate:g}", end) / len(BLOCKS)
        requests = self._requests(rate, seconds, SLO)
        blocks = [
            self._block(found, steps, other_prompts(requests, i, self._size), seconds) for i, steps in enumerate(BLOCKS)
        ]
        saving = [block for block in blocks if block.checkpoint_steps == CHECKPOINT_STEPS]
        other = [block for block in blocks if block not in saving]
        samples = [sample for block in saving for sample in block.samples]
        check_answers([sample for block in blocks for sample in block.samples])
        rates = {
            name: [round(block.tokens_a_second(), 1) for block in kind]
            for name, kind in (("checkpoints", saving), ("none", other))
        }
        row = latency(samples) | {"seconds": seconds, "finetune_tok_s": rates, "ft_cost": cost(**rates)}
        row |= {"without_checkpoints": latency([sample for block in other for sample in block.samples])}
        row["blocks"] = [
            {
                "checkpoint_steps": block.checkpoint_steps,
                "stalls": stalls(block.before, block.after),
                "allocations": allocations(block.before, block.after),
                "timeline": timeline(block.samples),
                "job_events": block.events,
            }
            for block in blocks
        ]
        self._jobs[f"r{rate:g}"] = row
        for name, unit in (("max_gap_ms", "ms"), ("ttft_p99_ms", "ms"), ("ft_cost", "fraction")):
            about: dict[str, Any] = {at: each[name] for at, each in self._jobs.items()}
            if name == "max_gap_ms":
                about = {"rates": self._jobs}
            if (value := worst(self._jobs, name)) is not None:
                self._put(f"stall.jobs.{name}", value, unit, about)

    def _block(self, found: Daemon, steps: int, requests: Sequence[LoadRequest], seconds: float) -> Block:
        """The requests beside jobs that checkpoint every `steps` steps."""
        clients = LoadProcesses(CLIENTS)
        with (
            Client(found.url) as client,
            training_jobs(client, self._size, self._settings(steps), ACTIVE_JOBS) as events,
        ):
            start = time.monotonic() + LEAD
            with ThreadPoolExecutor(1) as pool:
                sent = pool.submit(clients.run, found.url, requests, start=start)
                time.sleep(max(0.0, start - time.monotonic()))
                before, began = found.metrics(), time.monotonic()
                time.sleep(max(0.0, start + seconds - time.monotonic()))
                after, ended = found.metrics(), time.monotonic()
                samples = sent.result()
        return Block(steps, before, after, ended - began, samples, events)

    def _settings(self, checkpoint_steps: int) -> TrainingSettings:
        return TrainingSettings(
            steps=JOB_STEPS,
            batch_tokens=self._size.batch_tokens,
            max_length=self._size.row_tokens,
            validation_split=0.1,
            eval_steps=EVAL_STEPS,
            checkpoint_steps=checkpoint_steps,
            seed=SEED,
        )

    def _churn(self, found: Daemon, end: float) -> None:
        clients = LoadProcesses(CLIENTS)
        seconds = self._seconds("churn", end)
        before, start = found.metrics(), time.monotonic() + LEAD
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(clients.run, found.url, self._requests(RATE, seconds, SLO), start=start)
            done = asyncio.run(churn(found.url, start=start, seconds=0.8 * seconds))
            samples = sent.result()
        check_answers(samples)
        after = found.metrics()
        row = latency(samples) | done | {"seconds": seconds, "stalls": stalls(before, after)}
        row["allocations"] = allocations(before, after)
        self._put("stall.churn.max_gap_ms", row["max_gap_ms"], "ms", row | {"timeline": timeline(samples)})

    # ---- helpers

    def _requests(self, rate: float, seconds: float, slo: dict[str, float] | None = None) -> Sequence[LoadRequest]:
        """Poisson arrivals; the first request at once."""
        found = poisson_requests(replace(self._size, seconds=seconds), rate)
        first = msgspec.structs.replace(found[0], at=0.0)
        return [msgspec.structs.replace(request, slo=slo or {}) for request in (first, *found[1:])]

    def _seconds(self, part: str, end: float) -> float:
        """Seconds of arrivals that the budget leaves, at least one."""
        wanted = SECONDS[part] if self._size.device == "cuda" else self._size.seconds
        return round(max(1.0, min(wanted, end - TAIL - time.monotonic())), 1)

    def _put(self, key: str, value: float, unit: str, about: dict[str, Any] | None = None) -> None:
        self._results.put(key_of(key, self._kind), value, unit, target(key, self._tp), about=about)


def other_prompts(requests: Sequence[LoadRequest], shift: int, size: Size) -> list[LoadRequest]:
    """The same requests with other tokens, so that no prefix of an earlier prompt is found again."""
    first, count = FIRST_TOKEN, size.config["vocab_size"] - FIRST_TOKEN
    return [
        msgspec.structs.replace(each, prompt=[first + (token - first + shift) % count for token in each.prompt])
        for each in requests
    ]


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, tiny="a small base, on any machine, to try the script")
    add_names(parser, "--only", PARTS)
    parser.add_argument(
        "--scratch", type=Path, default=None, help="folder for base, adapters, data and caches; it is kept"
    )
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of each part; its arrivals are cut to fit")
    parser.add_argument("--policy", default=None, help="--policy of the daemon; default: the daemon's")
    parser.add_argument("--tp", type=int, default=1, help="--tp of the daemon")
    return parser.parse_args()


@contextlib.contextmanager
def scratch_folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def main() -> None:
    options = parse()
    size = SMALL if options.tiny else FULL
    jobs_about = {"active": ACTIVE_JOBS, "steps": JOB_STEPS, "checkpoint": CHECKPOINT_STEPS, "evaluate": EVAL_STEPS}
    with scratch_folder(options.scratch) as root:
        folders = Folders(root, size)
        folders.prepare()
        results = Results.of(
            options, FILE, __file__, {"rank": RANK, "seconds": SECONDS, "slo": SLO, "jobs": jobs_about}, seed=SEED
        )
        run = Stalls(size, folders, results, budget=options.budget, policy=options.policy, tp=options.tp)
        with contextlib.closing(run):
            for part in PARTS:
                if part in options.only.split(","):
                    run.run(part)
                    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
