"""coserve, vLLM, and vLLM beside a PEFT trainer under the same trace files, one after another on one machine.

    python -m benchmarks.peers.compare --rates 5,20 --seconds 60 --vllm-site /tmp/site --out benchmarks/results/peers
    python -m benchmarks.peers.compare --trace my.jsonl --systems coserve,vllm+peft --out /tmp/compared

Systems: `coserve` (its jobs train in it), `coserve-alone` (no jobs), `vllm`, `vllm+peft` (two processes on the GPU),
`peft` (the trainer alone, no prompts). Every system gets the same prompts, arrivals, lengths and adapter names through
`/v1/completions`, after the same warm-up, from the same client, and writes the same
files: OUT/TRACE/SYSTEM/report.json, .png and .html (`coserve bench`'s), and a row of OUT/peers.json. Without `--trace`
the workload is the preset `equal-8b` at each of `--rates`. The base is the Llama-3.1-8B shape with random weights, its
adapters are random.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common.options import check_tiny, make_parser
from benchmarks.common.provenance import command, commit, gpu_names, versions
from benchmarks.peers.processes import Trainer, module, training
from benchmarks.peers.systems import Place, coserve, vllm
from benchmarks.serving.http_case import ADAPTERS, FULL, RANK, SMALL, adapter_folders, model_folder
from coserve.cli.bench.run import Route, Server, run_bench
from coserve.workloads.openai_target import OpenAITarget
from coserve.workloads.opening import open_workload
from coserve.workloads.replay import ReplayResult, Rest, replay
from coserve.workloads.report.files import write_report
from coserve.workloads.scenario import Scenario
from coserve.workloads.summary import Summary, summarise
from coserve.workloads.trace import PromptArrival, Repeatable, Trace, load_trace, save_trace

SYSTEMS = ("coserve", "coserve-alone", "vllm", "vllm+peft", "peft")
WARM_TOKENS, WARM_OUTPUT = 64, 16


def only_prompts(trace: Trace) -> Trace:
    return Trace(
        trace.scenario, Repeatable(lambda: (each for each in trace.arrivals if isinstance(each, PromptArrival)))
    )


async def warm_up(url: str, model: str, scenario: Scenario) -> None:
    """Two rounds of a request for the base and each adapter at a time: adapters are loaded, kernels and graphs are
    there.

    Exits if one of them fails.
    """
    names = [None, *scenario.adapter_names]
    arrivals = [
        PromptArrival(
            at=0.0, index=i, adapter=name, prompt=tuple(range(300, 300 + WARM_TOKENS)), max_tokens=WARM_OUTPUT, seed=i
        )
        for i, name in enumerate(names)
    ]
    async with OpenAITarget(url, model=model) as target:
        for _ in range(2):
            run = await replay(Trace(scenario, arrivals), target, rest=Rest.LEAVE)
            if failed := {sample.error for sample in run.samples} - {None}:
                raise SystemExit(f"the warm-up failed: {failed}")


async def base_name(url: str) -> str:
    async with OpenAITarget(url, model="") as target:
        return (await target.models())[0]


async def measure(url: str, trace: Trace, trainer: Trainer | None = None) -> ReplayResult:
    """Send the prompts to an OpenAI-style server; the trainer's steps are the run's one fine-tuning job."""
    async with OpenAITarget(url, model=await base_name(url), temperature=trace.scenario.temperature) as target:
        start = asyncio.get_running_loop().time()  # the monotonic clock, as the trainer's
        run = await replay(only_prompts(trace), target, rest=Rest.LEAVE, probe=target.probe)
    return run if trainer is None else msgspec.structs.replace(run, jobs=(trainer.job(start),))


async def measure_training(trace: Trace, trainer: Trainer) -> ReplayResult:
    """The trainer's steps until the end of the arrival window, with no requests."""
    start, (_, end) = asyncio.get_running_loop().time(), trace.scenario.window
    await asyncio.sleep(end)
    return ReplayResult(scenario=trace.scenario, duration=end, samples=(), jobs=(trainer.job(start),))


async def measure_coserve(url: str, trace: Trace) -> ReplayResult:
    """As the others, and the trace's jobs to the daemon itself."""
    return await run_bench(
        trace, Rest.CANCEL, Server(url=url, route=Route.COMPLETIONS, prefix="", model=await base_name(url))
    )


Measure = Callable[[Trace], Coroutine[Any, Any, ReplayResult]]


@dataclass(frozen=True)
class Comparison:
    """`traces`: by name."""

    place: Place
    traces: dict[str, Path]
    out: Path
    plain: bool = False

    @contextlib.asynccontextmanager
    async def system(self, name: str, scenario: Scenario) -> AsyncIterator[Measure]:
        """A running system, warmed up: what measures it."""
        if name in ("coserve", "coserve-alone"):
            async with coserve(self.place, scenario) as url:
                await warm_up(url, await base_name(url), scenario)
                alone = name == "coserve-alone"
                yield lambda trace: measure_coserve(url, only_prompts(trace) if alone else trace)
            return
        if name == "peft":
            async with self.trainer() as steps:
                yield lambda trace: measure_training(trace, steps)
            return
        memory = self.place.shared_memory if name == "vllm+peft" else self.place.vllm_memory
        async with vllm(self.place, scenario, memory=memory) as url:
            await warm_up(url, "base", scenario)
            if name == "vllm":
                yield lambda trace: measure(url, trace)
                return
            async with self.trainer() as steps:
                yield lambda trace: measure(url, trace, steps)

    def trainer(self) -> contextlib.AbstractAsyncContextManager[Trainer]:
        """On the rows of the first trace."""
        options = ["--trace", str(next(iter(self.traces.values()))), "--model", str(self.place.model)]
        options += ["--plain"] if self.plain else []
        return training(module("benchmarks.peers.trainer", *options), self.place.scratch / "trainer.log", {})

    async def run(self, name: str) -> None:
        """All traces against one system."""
        scenarios = {key: load_trace(path).scenario for key, path in self.traces.items()}
        async with self.system(name, next(iter(scenarios.values()))) as measure_one:
            for key, path in self.traces.items():
                run = await measure_one(load_trace(path))
                summary = summarise(run)
                write_report(self.out / key / name, run, summary, name)
                found = row(summary) | {"gpu_memory_gib": await asyncio.to_thread(gpu_memory)}
                record(self.out, key, name, found)
                print(f"{key}  {name}: {json.dumps(found)}", flush=True)


def row(summary: Summary) -> dict[str, Any]:
    """The numbers of a comparison's table; milliseconds, tokens a second, shares."""
    first, each = summary.ttft, summary.tpot
    return {
        "requests": summary.requests,
        "errors": summary.errors,
        "prompt_tokens": summary.prompt_tokens,
        "output_tokens": summary.output_tokens,
        "in_slo": round(summary.attainment, 4),
        "in_slo_worst_adapter": round(summary.worst_attainment, 4),
        "ttft_ms": None if first is None else [round(1e3 * value, 1) for value in (first.p50, first.p90, first.p99)],
        "tpot_ms": None if each is None else [round(1e3 * value, 2) for value in (each.p50, each.p90, each.p99)],
        "finetune_tok_s": round(summary.finetune_window_throughput, 1),
        "finetune_peak_tok_s": None if summary.finetune_peak is None else round(summary.finetune_peak, 1),
        "finetune_share": None if summary.finetune_share is None else round(summary.finetune_share, 4),
        "lag_p99_ms": None if summary.lag is None else round(1e3 * summary.lag.p99, 2),
    }


def gpu_memory() -> float | None:
    """GiB in use on the first GPU that this process may use, by all processes; None without one."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={first}"]
    if shutil.which(query[0]) is None:
        return None
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return None if done.returncode else round(float(done.stdout.strip()) / 1024, 2)


def record(out: Path, trace: str, system: str, found: dict[str, Any]) -> None:
    """Write the row beside those that are there."""
    path = out / "peers.json"
    results = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    results["rows"][f"{trace}.{system}"] = found | {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    path.write_text(json.dumps(results, indent=1) + "\n")


def make_traces(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """The trace files of the run, by name; made unless they were given."""
    if options.trace:
        return {path.stem: path for path in options.trace}
    given: dict[str, Any] = {"preset": "equal-8b", "duration": options.seconds, "lead": options.lead}
    if options.tiny:
        given |= {"vocab": SMALL.config["vocab_size"], "max_prompt_tokens": 64, "max_tokens": 16, "row_tokens": 64}
        given |= {"batch_tokens": 128, "finetune_rows": 4, "adapters": 2, "rank": (RANK,)}
    if options.slo:
        given |= {"slo_ttft": options.slo[0], "slo_tpot": options.slo[1]}
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for rate in options.rates:
        name = f"r{rate:g}" + (f"-{options.slo[0]:g}s-{1e3 * options.slo[1]:g}ms" if options.slo else "")
        found[name] = folder / f"{name}.jsonl"
        save_trace(open_workload(given | {"rate": rate}), found[name])
    return found


def make_adapters(root: Path, config: dict[str, Any], scenario: Scenario) -> Path:
    """PEFT folders under the trace's names. Exits for a trace that needs others."""
    if scenario.adapters > ADAPTERS or set(scenario.rank) != {RANK}:
        raise SystemExit(f"expected a trace of at most {ADAPTERS} adapters of rank {RANK}")
    for folder, name in zip(adapter_folders(root, config), scenario.adapter_names, strict=False):
        folder.rename(root / name)
    return root


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, tiny="a small base, on any machine, to try the script")
    parser.add_argument("--systems", default="coserve,vllm,vllm+peft")
    parser.add_argument("--trace", type=Path, action="append", help="trace file; may be repeated")
    parser.add_argument("--rates", type=numbers, default=[5.0, 20.0], help="requests a second, of the preset")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, of the preset")
    parser.add_argument("--lead", type=float, default=30.0, help="seconds of fine-tuning alone before them")
    parser.add_argument("--slo", type=numbers, default=None, help="TTFT,TPOT in seconds instead of 5,0.045")
    parser.add_argument("--vllm-site", type=Path, default=None, help="folder with vLLM and what it needs")
    parser.add_argument("--plain", action="store_true", help="PEFT without compiled layers and chunked loss")
    parser.add_argument("--scratch", type=Path, default=None, help="folder for the base, the adapters and the data")
    options = parser.parse_args()
    check_tiny(parser, options)
    if unknown := set(options.systems.split(",")) - set(SYSTEMS):
        parser.error(f"--systems: expected some of {', '.join(SYSTEMS)}, got {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    options = parse()
    size = SMALL if options.tiny else FULL
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        root = Path(scratch)
        traces = make_traces(options, options.out / "traces")
        scenario = load_trace(next(iter(traces.values()))).scenario
        model = model_folder(root / "model", size)
        place = Place(size, model, make_adapters(root / "adapters", size.config, scenario), root, options.vllm_site)
        comparison = Comparison(place, traces, options.out, options.plain)
        for name in options.systems.split(","):
            asyncio.run(comparison.run(name))
    about = {
        "hardware": gpu_names(options.tiny),
        "versions": versions(),
        "commit": options.commit or commit()[0],
        "command": command("benchmarks.peers.compare"),
        "scenario": dataclasses.asdict(scenario),
    }
    path = options.out / "peers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"run": about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
