"""Equal loads at 8B: coserve that always trains, vLLM beside a PEFT trainer, and what coserve serves without training.

    python -m benchmarks.peers.equal_loads --only alone,coserve --budget 560 --out benchmarks/results
    python -m benchmarks.peers.equal_loads --only coserve --policies slack,overlap --cells r5 --budget 560 --out \
        benchmarks/results
    python -m benchmarks.peers.equal_loads --only vllm+peft --vllm-site /tmp/site --budget 560 --out benchmarks/results
    python -m benchmarks.peers.equal_loads --only vllm --vllm-site /tmp/site --seconds 20 --budget 560 --out \
        benchmarks/results
    python -m benchmarks.peers.equal_loads --only vllm+peft --cells r5,r20 --duties 1,0.5,0.25,0.1 --mps-shares 25,50 \
        --seconds 20 --vllm-site /tmp/site --budget 560 --out benchmarks/results
    python -m benchmarks.peers.equal_loads --gpus 3 --vllm-site /tmp/site --out /tmp/equal       (all at the same \
        time, a part a GPU)
    python -m benchmarks.peers.equal_loads --publish [FOLDER/equal_loads.json ...]
    python -m benchmarks.peers.equal_loads --tiny --only alone,coserve --out /tmp/tried

The Llama-3.1-8B shape with random weights, 32 adapters of rank 16, the preset `equal-8b`: Poisson arrivals, log-normal
lengths. Limits 5 s to the first token and 45 ms for each further one, and 1 s and 20 ms; coserve's requests carry the
limits that are judged as their targets. Both systems get the same trace files through `/v1/completions` from the same
clients, and train 8 rows of 512 tokens a step all the time: coserve in jobs of 25 steps, which checkpoint and publish,
five of them at a time; PEFT one job without checkpoints. Each of `--policies` has a daemon of its own; rows and keys of
others than slack are named `coserve.POLICY`. Fine-tuning's peak is measured first, alone. The cells `flexllm.*` have
the arrivals of the preset `flexllm-8b`.

The peer as a strong user runs it: `--duties` are shares of the time in which PEFT computes, `--mps-shares` percentages
of the GPU's threads that it has under MPS. Rows are named `vllm+peft@mpsSHARE.dDUTY`; the most that PEFT trains while
99% of the requests are within their limits is `peers.equal_attainment.*`, beside what coserve trains then. `vllm` is
vLLM alone. Each row has the versions, flags and environment. `--apart`, on two GPUs: vLLM has one and PEFT the other,
coserve both; the keys begin with `two.`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import traceback
from collections.abc import Awaitable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from benchmarks.common import gpus
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.provenance import machine
from benchmarks.common.results import Results, merge_results
from benchmarks.peers.always import Jobs, always_training
from benchmarks.peers.client import base_name, replay_prompts, warm_up
from benchmarks.peers.device_time import Window
from benchmarks.peers.equal_report import FILE, H200_FILE, LOOSE, STRICT, TWO_FILE, peer_system, publish, system_of
from benchmarks.peers.loads import Cell, chosen_cells, only_prompts, scenario_of
from benchmarks.peers.processes import Trainer, module, training
from benchmarks.peers.systems import Place, coserve, gpu_memory, make_adapters, mps, peer_about, vllm
from benchmarks.serving.http_case import FULL, RANK, SMALL, model_folder
from coserve.workloads.bundled import bundled_rows
from coserve.workloads.metrics import Limits, attainment, attains
from coserve.workloads.opening import open_workload
from coserve.workloads.replay import ReplayResult
from coserve.workloads.scenario import Scenario
from coserve.workloads.summary import summarise
from coserve.workloads.trace import load_trace, save_trace

SCRIPT = "benchmarks.peers.equal_loads"
SEED = 0
PARTS = ("alone", "coserve", "vllm", "vllm+peft")
POLICIES = ("slack", "spatial", "overlap", "overlap-between")
"""Those under which fine-tuning runs beside requests all the time."""
PEAK_SECONDS = 20.0
TRAINING = Cell("training", 5.0, 10.0, LOOSE)
"""Whose adapters are loaded and whose jobs are trained, in all cells alike."""
CLIENTS = 4
"""Processes that send requests."""


class EqualLoads:
    """Measures cells; each result is written as soon as it is measured."""

    def __init__(
        self,
        place: Place,
        results: Results,
        known: Collection[str],
        *,
        tiny: bool,
        budget: float,
        only_cells: Collection[str] = (),
        seconds: float | None = None,
    ) -> None:
        """`known`: names of results that are not measured again; `only_cells`: names of cells; empty: all. `seconds`:
        of arrivals in each cell; None: as it has them."""
        self._only_cells, self._seconds = only_cells, seconds
        self._place, self._results, self._known, self._tiny = place, results, known, tiny
        self._began, self._deadline = time.monotonic(), time.monotonic() + budget
        self._traces = place.scratch / "traces"
        self._runs = place.scratch / "runs"
        self._traces.mkdir(exist_ok=True)
        self._runs.mkdir(exist_ok=True)

    def log(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {what}", flush=True)

    def trace(self, cell: Cell) -> Path:
        """The trace file of a cell, the same for every system."""
        path = self._traces / f"{cell.trace}.jsonl"
        save_trace(only_prompts(open_workload(scenario_of(cell, tiny=self._tiny))), path)
        return path

    def cells(self, system: str) -> list[Cell]:
        kind = "coserve" if system.startswith("coserve.") else system.partition("@")[0]
        return [
            cell if self._seconds is None else replace(cell, seconds=self._seconds)
            for cell in chosen_cells(kind, tiny=self._tiny)
            if f"{cell.name}.{system}" not in self._known and (not self._only_cells or cell.name in self._only_cells)
        ]

    def _has_time(self, cell: Cell) -> bool:
        return time.monotonic() + cell.expected <= self._deadline

    async def run_coserve(self, parts: Sequence[str], policy: str) -> None:
        scenario = open_workload(scenario_of(TRAINING, tiny=self._tiny)).scenario
        system = system_of(policy)
        async with coserve(self._place, scenario, policy) as url:
            self.log(f"{system} is warm")
            model = await base_name(url)
            await warm_up(url, model, scenario)
            if "alone" in parts:
                for cell in self.cells("alone"):
                    await self._measure(url, model, cell, "alone")
            if "coserve" in parts:
                async with always_training(url, scenario, bundled_rows(scenario.row_tokens)) as jobs:
                    peak = await self._peak(jobs, system)
                    for cell in self.cells(system):
                        await self._measure(url, model, cell, system, jobs, peak)

    def _training_trace(self) -> Path:
        """A trace with jobs, from which the trainer takes its rows."""
        path = self._traces / "training.jsonl"
        save_trace(open_workload(scenario_of(TRAINING, tiny=self._tiny)), path)
        return path

    async def run_vllm(self) -> None:
        """vLLM alone, with all of the memory."""
        cells, scenario = self.cells("vllm"), load_trace(self._training_trace()).scenario
        memory = self._place.vllm_memory
        async with AsyncExitStack() as stack:
            url = await self._warm_vllm(stack.enter_async_context(vllm(self._place, scenario, memory=memory)), scenario)
            for cell in cells:
                await self._measure(url, "base", cell, "vllm", about=peer_about(self._place, scenario, memory=memory))

    async def run_vllm_beside_peft(
        self, duties: Sequence[float], share: int | None, starting: asyncio.Task[str], base: Mapping[str, str]
    ) -> None:
        """PEFT with a share of the threads, at each duty cycle, beside a warm vLLM. `starting`: returns its URL."""
        whole = self._training_trace()
        options = ["--trace", str(whole), "--model", str(self._place.model)] + ["--plain"] * self._tiny
        environment = {**base} | ({} if share is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)})
        scenario, memory = load_trace(whole).scenario, self._place.beside_memory
        about = peer_about(self._place, scenario, memory=memory) | {"mps_share": share}
        environment |= {"CUDA_VISIBLE_DEVICES": "1"} if self._place.apart else {}
        log = self._place.scratch / "trainer.log"
        async with training(module("benchmarks.peers.trainer", *options), log, environment) as trainer:
            self.log("PEFT trains")
            url = await starting
            peak = await self._peak(trainer, peer_system(share, 1.0))
            for duty in duties:
                trainer.set_duty(duty)
                system = peer_system(share, duty)
                for cell in self.cells(system):
                    await self._measure(url, "base", cell, system, trainer, peak, about=about | {"duty": duty})

    async def run_peers(self, duties: Sequence[float], shares: Sequence[int]) -> None:
        """vLLM beside PEFT: without MPS (no `shares`), or under it with each of them; or on a GPU of its own."""
        scenario = load_trace(self._training_trace()).scenario
        async with AsyncExitStack() as stack:
            environment = await stack.enter_async_context(mps(self._place.scratch / "mps")) if shares else {}
            own = environment | ({"CUDA_VISIBLE_DEVICES": "0"} if self._place.apart else {})
            server = vllm(self._place, scenario, memory=self._place.beside_memory, environment=own)
            starting = asyncio.create_task(self._warm_vllm(stack.enter_async_context(server), scenario))
            if not self._place.apart:  # where PEFT had memory already, vLLM would not find its share
                await starting
            for share in shares or (None,):
                left = [cell for duty in duties for cell in self.cells(peer_system(share, duty))]
                if any(map(self._has_time, left)):
                    await self.run_vllm_beside_peft(duties, share, starting, environment)

    async def _warm_vllm(self, started: Awaitable[str], scenario: Scenario) -> str:
        """Return the URL of a server once it has warmed up."""
        url = await started
        self.log("vLLM answers")
        await warm_up(url, "base", scenario)
        return url

    async def _peak(self, trainer: Trainer, system: str) -> float:
        """Tokens a second without requests."""
        seconds = 4.0 if self._tiny else PEAK_SECONDS
        start = time.monotonic()
        await asyncio.sleep(seconds)
        tokens = sum(tokens for at, tokens in trainer.steps if start <= at)
        self._results.put(
            f"peak.{system}",
            round(tokens / seconds, 1),
            "tok/s, fine-tuning alone",
            about=self._ends(trainer, start, seconds),
        )
        self.log(f"peak measured: {tokens / seconds:.0f} tokens/s")
        return tokens / seconds

    def _ends(self, trainer: Trainer, start: float, seconds: float) -> dict[str, Any]:
        """How many jobs published inside the window."""
        if not isinstance(trainer, Jobs):
            return {}
        return {"published": sum(start <= at <= start + seconds for at in trainer.published)}

    async def _measure(
        self,
        url: str,
        model: str,
        cell: Cell,
        system: str,
        trainer: Trainer | None = None,
        peak: float | None = None,
        about: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """`about`: further fields of the row."""
        if not self._has_time(cell):
            self.log(f"no time is left for {cell.name}.{system}")
            return
        peer = system.startswith("vllm")
        targets = {} if peer else {"slo_ttft": cell.limits[0], "slo_tpot": cell.limits[1]}
        clients = 1 if self._tiny else CLIENTS
        window = None if peer else Window(url, cell.seconds)
        begins = None if window is None else window.begins
        run, start = await replay_prompts(url, model, self.trace(cell), clients, targets, begins)
        counted = {} if window is None else {"device_time": await window.found()}
        if trainer is not None:
            run = msgspec.structs.replace(run, jobs=(trainer.job(start),))
        (self._runs / f"{cell.name}.{system}.json").write_bytes(msgspec.json.encode(run))
        found = row(run, cell, peak) | {"system": system, "gpu_memory_gib": await asyncio.to_thread(gpu_memory)}
        found |= counted | dict(about)
        if trainer is not None:
            found |= self._ends(trainer, start, cell.seconds)
        self._results.put(f"{cell.name}.{system}", found["in_slo"], "share of requests in the limits", about=found)
        self.log(f"{cell.name}.{system}: {json.dumps(found)}")
        await asyncio.sleep(1.0)


def row(run: ReplayResult, cell: Cell, peak: float | None) -> dict[str, Any]:
    """Milliseconds, shares of all requests, requests and tokens a second of the arrival window."""
    summary = summarise(run, limits=Limits(*cell.limits), peak=peak)
    seconds = run.scenario.duration
    found: dict[str, Any] = {
        "rate": cell.rate,
        "seconds": seconds,
        "limits_s": cell.limits,
        "requests": summary.requests,
        "errors": summary.errors,
        "in_slo": round(summary.attainment, 4),
        "in_slo_strict": round(attainment(run.samples, Limits(*STRICT)), 4),
        "in_slo_worst_adapter": round(summary.worst_attainment, 4),
        "goodput": round(sum(attains(sample, Limits(*cell.limits)) for sample in run.samples) / seconds, 3),
        "output_tok_s": round(summary.output_throughput, 1),
    }
    for name, each, scale in (
        ("ttft_ms", summary.ttft, 1),
        ("tpot_ms", summary.tpot, 2),
        ("sent_late_ms", summary.lag, 2),
    ):
        if each is not None:
            found[name] = {part: round(1e3 * getattr(each, part), scale) for part in ("p50", "p90", "p99")}
    if peak is not None:
        share = None if summary.finetune_share is None else round(summary.finetune_share, 4)
        found |= {"finetune_tok_s": round(summary.finetune_window_throughput, 1), "finetune_share": share}
    return found


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, tiny="a small base, on any machine, to try the script")
    add_names(parser, "--only", PARTS)
    add_names(parser, "--policies", POLICIES, default=("slack",), what="policies of coserve, each with its own daemon")
    parser.add_argument("--cells", default="", help="names of cells, such as r5,r20.strict; default: all")
    gpus.add_options(
        parser,
        gpus="GPUs over which the parts are dealt in turn, measured at the same time",
        scratch="folder of the base, adapters, data, logs and single runs; kept if it is given",
    )
    parser.add_argument("--seconds", type=float, default=None, help="of arrivals in each cell, instead of 20 to 45")
    parser.add_argument("--duties", default="1", help="vllm+peft: shares of the time in which PEFT computes")
    parser.add_argument(
        "--mps-shares", default="", help="vllm+peft: percentages of the threads under MPS; default: no MPS"
    )
    parser.add_argument(
        "--apart", action="store_true", help="two GPUs: one serves and one trains; coserve does both on both (--tp 2)"
    )
    parser.add_argument("--vllm-strong", action="store_true", help="vLLM's settings for LoRA that are off by default")
    parser.add_argument("--vllm-site", type=Path, default=None, help="folder with vLLM and what it needs")
    options = parser.parse_args()
    if options.publish is not None:
        return options
    options.cells = [name for name in options.cells.split(",") if name]
    options.duties = [float(part) for part in options.duties.split(",")]
    options.mps_shares = [int(part) for part in options.mps_shares.split(",") if part]
    if options.tiny and set(options.policies) != {"slack"}:
        parser.error("--tiny: expected --policies slack, as the others need a GPU")
    return options


def file_of(tiny: bool, apart: bool) -> str:
    """The result file of this machine's GPUs: shares of H100s, of H200s and of two GPUs are not compared."""
    if apart:
        return TWO_FILE
    return H200_FILE if "H200" in machine(tiny=tiny) else FILE


def measure_here(options: argparse.Namespace, scratch: Path) -> None:
    size = SMALL if options.tiny else FULL
    settings = {name: value for name, value in vars(size).items() if name != "config"}
    settings |= {"rank": RANK, "clients": CLIENTS}
    results = Results.of(options, file_of(options.tiny, options.apart), __file__, settings, seed=SEED)
    scenario = open_workload(scenario_of(Cell("adapters", 5.0, 1.0, LOOSE), tiny=options.tiny)).scenario
    adapters, model = scratch / "adapters", scratch / "model"
    if not model.exists():  # vLLM finds what it has compiled by the path of its model
        make_adapters(adapters, size.config, scenario)
        model_folder(model, size)
    place = Place(size, model, adapters, scratch, options.vllm_site, strong=options.vllm_strong, apart=options.apart)
    benchmark = EqualLoads(
        place,
        results,
        gpus.known_keys(options, results),
        tiny=options.tiny,
        budget=options.budget,
        only_cells=options.cells,
        seconds=options.seconds,
    )
    ours = [part for part in options.only if not part.startswith("vllm")]
    runs = list[Coroutine[Any, Any, None]]()
    for policy in options.policies if ours else ():
        runs.append(benchmark.run_coserve(ours, policy))
        ours = [part for part in ours if part != "alone"]  # without training all policies are alike
        if not ours:
            break
    if "vllm" in options.only:
        runs.append(benchmark.run_vllm())
    if "vllm+peft" in options.only:
        runs.append(benchmark.run_peers(options.duties, options.mps_shares))
    failed = 0
    for run in runs:
        try:
            asyncio.run(run)
        except (Exception, SystemExit):  # noqa: BLE001 - the others are still to be measured
            failed += 1
            traceback.print_exc()
    if failed:
        raise SystemExit(f"{failed} of {len(runs)} servers failed")


def main() -> None:
    options = parse()
    if options.publish is not None:
        for file in options.publish:
            merge_results(file)
        publish()
        return
    common = ["--policies", ",".join(options.policies), "--cells", ",".join(options.cells)]
    common += [] if options.seconds is None else ["--seconds", str(options.seconds)]
    common += ["--duties", ",".join(map(str, options.duties)), "--mps-shares", ",".join(map(str, options.mps_shares))]
    common += ["--vllm-strong"] * options.vllm_strong + ["--apart"] * options.apart
    common += [] if options.vllm_site is None else ["--vllm-site", str(options.vllm_site)]
    hands = [[*common, "--only", ",".join(parts)] for parts in gpus.deal(options.only, options.gpus)]
    gpus.measure(options, partial(measure_here, options), SCRIPT, file_of(options.tiny, options.apart), hands)


if __name__ == "__main__":
    main()
