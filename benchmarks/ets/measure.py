"""Table 5.2 and figure 5.2 of the ETS paper over HTTP, then more load until each policy breaks.

    python -m benchmarks.ets.measure --only table --out benchmarks/results              (about 10 minutes on one GPU)
    python -m benchmarks.ets.measure --only table --systems paper --seconds 20 --budget 350 --out benchmarks/results
                                                                                          (about 6 minutes on one GPU)
    python -m benchmarks.ets.measure --only answers --systems paper --seconds 20 --budget 350 --out benchmarks/results
    python -m benchmarks.ets.measure --only table --systems ets+1,ets+2.5,block_sparse.ets+1 --seconds 20 --out \
        benchmarks/results
    python -m benchmarks.ets.measure --only table,figure,rates --gpus 6 --out /tmp/ets  (a policy a GPU)
    python -m benchmarks.ets.measure --backends block_sparse --policies ets,ts10,slack --only table --out \
        benchmarks/results
    python -m benchmarks.ets.measure --only figure,rates --cells rows4096,x16 --policies slack,ets,ts5 --out \
        benchmarks/results
    python -m benchmarks.ets.measure --publish [FOLDER/ets.json ...]     (takes these in, draws, puts the keys in \
        summary.json)
    python -m benchmarks.ets.measure --tiny --only table --policies ets,slack --out /tmp/tried

GPT-2 medium in bfloat16 with random weights; 32 adapters of rank 32 on `c_attn` and `c_proj`. As in its section 5.2: a
prompt each 0.1 s, 512 rows each 20 s; fine-tuning batches of 32 rows, inference batches of at most 64 requests that
wait at most 5 s. The paper does not say how long it ran, its rows' length and its answers': here 60 s of arrivals, 480
tokens, 16 to 64 tokens. A burst's rows are one job of an adapter that is drawn (`docs/LOG.md`, Scheduling), in the part
`mixed` a job for each adapter; in the part `answers` all answers have 20 tokens. Systems are named
`[block_sparse.]POLICY`; with `+SECONDS` a policy waits so long for an inference batch instead of 5 s. Every policy gets
the same arrivals from a daemon of its own. Each cell is written as soon as it is measured, and one that was measured
stays: a run with `--skip-measured` goes on where another was cut off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import gpus
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results, merge_results
from benchmarks.ets.loads import (
    BACKENDS,
    PAPER,
    POLICIES,
    TINY,
    Cell,
    Load,
    Sizes,
    System,
    cells,
    expected_seconds,
    known_policies,
    load_trace_of,
    offered_tok_s,
    serve_settings,
    system,
    warm_up_load,
)
from benchmarks.ets.report import FILE, publish
from benchmarks.peers.systems import serving
from benchmarks.serving.http_case import FULL, model_folder
from coserve.client import AsyncClient
from coserve.core.errors import CoserveError
from coserve.core.processes import allow_more_files
from coserve.workloads.replay import Rest, replay
from coserve.workloads.summary import Summary, summarise
from coserve.workloads.target import NO_RETRIES, DaemonTarget

SCRIPT = "benchmarks.ets.measure"
SEED = 0
PARTS = ("table", "answers", "mixed", "figure", "rates")
SYSTEMS = {
    "paper": (
        *("block_sparse.ets", "block_sparse.ts5", "block_sparse.ts10"),
        *("overlap", "block_sparse.overlap", "ets", "slack", "block_sparse.ts20"),
    )
}
"""Sets of systems; `paper`: the paper's policies with its kernels, and ours beside them."""
PATIENCE = 90.0
"""Seconds after which a request is given up; it is then beyond every limit."""
TARGETS = {"segmented": (0.1, 0.005), "block_sparse": (1.0, 0.1)}
"""TTFT and TPOT of the daemons, in seconds; of the policies only `slack`, `spatial` and `overlap` keep them. An answer
of 64 tokens within the segmented ones takes
0.42 s at most. Steps of block_sparse without graphs take longer than 5 ms."""


async def send(url: str, load: Load, sizes: Sizes) -> Summary:
    """One load; what it left is cancelled."""
    trace = load_trace_of(load, sizes, SEED)
    async with AsyncClient(url, retry=NO_RETRIES) as client:
        target = DaemonTarget(client, trace.scenario)
        await target.prepare(trace.scenario.adapter_names)
        return summarise(await replay(trace, target, rest=Rest.CANCEL, request_timeout=PATIENCE))


def row(summary: Summary, load: Load, sizes: Sizes) -> dict[str, Any]:
    """Seconds, shares of all requests, tokens a second."""
    mean = summary.e2e.mean if summary.e2e is not None else None
    return {
        "load": asdict(load),
        "requests": summary.requests,
        "errors": summary.errors,
        "latency_mean_s": None if mean is None else round(mean, 4),
        "latency_p99_s": None if summary.e2e is None else round(summary.e2e.p99, 4),
        "ttft_p50_s": None if summary.ttft is None else round(summary.ttft.p50, 4),
        "tpot_p50_s": None if summary.tpot is None else round(summary.tpot.p50, 5),
        "in_1s": round(summary.slo_attainment["1"], 4),
        "in_10s": round(summary.slo_attainment["10"], 4),
        "in_60s": round(summary.slo_attainment["60"], 4),
        "finetune_tok_s": round(summary.finetune_window_throughput, 1),
        "finetune_offered_tok_s": offered_tok_s(load, sizes),
        "job_errors": summary.job_errors,
        "sent_late_p99_ms": None if summary.lag is None else round(1e3 * summary.lag.p99, 2),
    }


class EtsBenchmark:
    """Measures cells on systems; each result is written as soon as it is measured."""

    def __init__(
        self, sizes: Sizes, results: Results, scratch: Path, known: set[str], *, tiny: bool, deadline: float
    ) -> None:
        """`known`: keys that are not measured again. `deadline`: on the monotonic clock."""
        self._sizes, self._results, self._scratch, self._known, self._tiny = sizes, results, scratch, known, tiny
        self._began, self._deadline = time.monotonic(), deadline
        self._model: Path | str = "bundled"
        if sizes.model is not None:
            folder = scratch / "model"
            self._model = folder if folder.exists() else model_folder(folder, replace(FULL, config=sizes.model))

    def log(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {what}", flush=True)

    def has_time(self, cell: Cell) -> bool:
        return time.monotonic() + cell.expected <= self._deadline

    def left(self, each: System, chosen: Sequence[Cell]) -> list[Cell]:
        """The cells that are to be measured and can be in the time that is left."""
        return [cell for cell in chosen if f"{cell.name}.{each.name}" not in self._known and self.has_time(cell)]

    async def run(self, systems: Sequence[System], chosen: Sequence[Cell]) -> None:
        """All cells on each of the systems. Their daemons run at the same time, of which the idle ones use no GPU
        time."""
        first, *others = systems
        async with AsyncExitStack() as stack:

            async def start(each: System) -> str | None:
                """Its URL; None where it does not start, such as `spatial` on a GPU that cannot be split."""
                try:
                    daemon = serving(self._settings(each), self._scratch / f"{each.name}.log")
                    return await stack.enter_async_context(daemon)
                except SystemExit as failure:
                    self.log(f"{each.name}: {failure}")
                    return None

            urls = [await start(first)]  # it fills the caches of compiled kernels
            self.log(f"{first.name} has started")
            urls += await asyncio.gather(*(start(each) for each in others))
            self.log(f"{sum(url is not None for url in urls)} daemons are warm")
            for each, url in zip(systems, urls, strict=True):
                if url is None:
                    continue
                try:
                    await self._measure(each, url, self.left(each, chosen))
                except CoserveError as failure:
                    self.log(f"{each.name} failed, see its log: {failure}")

    def _settings(self, each: System) -> dict[str, object]:
        shared = serve_settings(self._sizes, self._model, self._scratch / f"data-{each.name}", self._scratch / "cache")
        return shared | each.settings(self._sizes.device)

    async def _measure(self, each: System, url: str, chosen: Sequence[Cell]) -> None:
        if chosen:
            await send(url, warm_up_load(self._sizes, tiny=self._tiny), self._sizes)
            self.log(f"{each.name} has its adapters and its kernels")
        for cell in chosen:
            if not self.has_time(cell):
                self.log(f"no time is left for {cell.name}.{each.name}")
                continue
            summary = await send(url, cell.load, self._sizes)
            about = row(summary, cell.load, self._sizes) | {"system": asdict(each), "part": cell.part}
            self.log(f"{cell.name}.{each.name}: {json.dumps(about)}")
            if summary.e2e is not None:  # else no request was answered
                self._results.put(
                    f"{cell.name}.{each.name}", round(summary.e2e.mean, 4), "s, mean latency", about=about
                )


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, tiny="the bundled base on the CPU, to try the script")
    add_names(parser, "--only", PARTS)
    parser.add_argument(
        "--policies",
        default=None,
        help=f"some of {', '.join(POLICIES)}; default: all, without a GPU all but spatial and overlap",
    )
    parser.add_argument(
        "--systems",
        default=None,
        help=f"instead of --policies and --backends: names such as overlap,block_sparse.ets+1, or {', '.join(SYSTEMS)}",
    )
    parser.add_argument("--seconds", type=float, default=None, help="of arrivals in each cell, instead of 60 or 40")
    add_names(parser, "--backends", BACKENDS, default=BACKENDS[:1], what="kernels")
    parser.add_argument(
        "--targets",
        default=None,
        help="TTFT and TPOT of the daemons in seconds, such as 0.1,0.012; default: by backend",
    )
    parser.add_argument("--label", default="", help="keys become CELL.LABEL.SYSTEM: for targets unlike the tables'")
    names = sorted({cell.name for tiny in (True, False) for cell in cells(tiny=tiny)})
    add_names(parser, "--cells", names, default=(), what="cells of these parts; default: all")
    parser.add_argument("--together", type=int, default=3, help="daemons that are started at a time, on each GPU")
    gpus.add_options(
        parser,
        gpus="GPUs over which the policies are spread, measured at the same time",
        scratch="folder of data and caches; kept if it is given",
    )
    options = parser.parse_args()
    if options.publish is not None:
        return options
    policies = known_policies(gpu=not options.tiny)
    options.policies = list(policies) if options.policies is None else options.policies.split(",")
    if options.targets is not None:
        ttft, tpot = (float(part) for part in options.targets.split(","))
        options.targets = ttft, tpot
    if options.systems is not None:
        options.systems = SYSTEMS.get(options.systems) or options.systems.split(",")
    plain = {policy.partition("+")[0] for _, policy in systems(options)}
    if unknown := sorted(plain - set(policies)):
        parser.error(f"expected policies among {', '.join(policies)}, got {', '.join(unknown)}")
    return options


def systems(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The backend and the policy of each system."""
    if options.systems is None:
        return [(backend, policy) for backend in options.backends for policy in options.policies]
    sparse = f"{BACKENDS[1]}."
    return [(BACKENDS[name.startswith(sparse)], name.removeprefix(sparse)) for name in options.systems]


def measure_here(options: argparse.Namespace, chosen: Sequence[Cell], scratch: Path) -> None:
    sizes = TINY if options.tiny else PAPER
    settings = {name: value for name, value in vars(sizes).items() if name != "model"}
    settings |= {"targets_s": options.targets or TARGETS}
    results = Results.of(options, FILE, __file__, settings, seed=SEED)
    todo = [
        system(policy, backend, options.targets or ((0.5, 0.1) if options.tiny else TARGETS[backend]), options.label)
        for backend, policy in systems(options)
    ]
    known = gpus.known_keys(options, results)
    deadline = time.monotonic() + options.budget
    benchmark = EtsBenchmark(sizes, results, scratch, known, tiny=options.tiny, deadline=deadline)
    todo = [each for each in todo if benchmark.left(each, chosen)]
    seconds = expected_seconds(todo, chosen, options.together)
    print(f"{len(todo)} systems, {len(chosen)} cells each: about {seconds:.0f} s", flush=True)
    for at in range(0, len(todo), options.together):
        if group := [each for each in todo[at : at + options.together] if benchmark.left(each, chosen)]:
            asyncio.run(benchmark.run(group, chosen))


def main() -> None:
    options = parse()
    if options.publish is not None:
        for file in options.publish:
            merge_results(file)
        publish()
        return
    allow_more_files()  # beyond what a policy can serve, many requests wait
    chosen = [
        cell if options.seconds is None else replace(cell, load=replace(cell.load, seconds=options.seconds))
        for cell in cells(tiny=options.tiny)
        if cell.part in options.only and (not options.cells or cell.name in options.cells)
    ]
    common = ["--cells", ",".join(options.cells)]
    common += ["--only", ",".join(options.only), "--backends", ",".join(options.backends)]
    common += ["--together", str(options.together)]
    common += ["--targets", ",".join(map(str, options.targets))] if options.targets is not None else []
    common += ["--seconds", str(options.seconds)] if options.seconds is not None else []
    dealt = ("--policies", options.policies) if options.systems is None else ("--systems", options.systems)
    hands = [[*common, dealt[0], ",".join(hand)] for hand in gpus.deal(dealt[1], options.gpus)]
    gpus.measure(options, partial(measure_here, options, chosen), SCRIPT, FILE, hands)


if __name__ == "__main__":
    main()
