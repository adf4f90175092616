"""Policies side by side on one workload, in virtual time: the real engine loop over a GPU whose times are given.

    coserve bench --preset equal-8b --duration 20 --lead 5 --no-run --save load.jsonl
    python -m benchmarks.scheduling.compare load.jsonl --policies slack,overlap,ets,ts,FILE.py:CLASS

Times are those of `overlap_risk.py`, about an 8B model's on an H200, with its errors; a text has a token for each four
characters. Beside training a step has 0.41 of its speed, and training 0.8; under policies that divide the GPU each has
its share always. A request is in its targets if it keeps the workload's limits (`slo_ttft`, `slo_tpot`, `slo_e2e`), or
the daemon's targets where there are none. Training's tokens/s are of the arrival window. Prints a table. Needs no GPU;
says what policies do with such times, not what a GPU reaches.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from benchmarks.scheduling.overlap_risk import STEP, STEP_SPEED, TRAIN_SPEED, slower
from benchmarks.scheduling.slack_risk import MICRO_SECONDS, Recording, play, step_seconds, token_times
from coserve.config import Config
from coserve.core.link.generation import Generate
from coserve.core.link.jobs import StartJob
from coserve.core.link.link import ToEngine
from coserve.core.options import parse_setting
from coserve.core.sampling import SamplingParams
from coserve.core.training.micro_step import MicroStep
from coserve.core.types import AdapterRef, Slo
from coserve.engine.job_runner import JobPlaces
from coserve.engine.spatial.slices_in_flight import TURNS, Marks
from coserve.queues.policies.choice import POLICIES
from coserve.queues.policy import NamedPolicy
from coserve.workloads.scenario import Scenario
from coserve.workloads.trace import PromptArrival, Trace, load_trace
from tests.support import fake_ports
from tests.support.fake_gpu import Noise
from tests.support.fake_ports import FREE, Inline, JobPlan, Meter
from tests.support.scenario import job_spec
from tests.support.shared_gpu import SharedGpu, SharingGenerator, SharingTrainer, WholeTrainer
from tests.support.virtual_clock import run_virtual

LAYERS, BATCH_TOKENS = 32, 4096
COLUMNS = "policy", "TTFT p50, s", "TTFT p99, s", "TPOT, ms", "E2E, s", "in targets", "training, tok/s"


class Row(NamedTuple):
    ttft_p50: float
    ttft_p99: float
    tpot: float
    e2e: float
    in_targets: float
    training: float
    """Tokens a second."""


def policy_of(name: str) -> type[NamedPolicy]:
    """Return a policy of the daemon by its name, or the class of a file, `FILE.py:CLASS`."""
    path, _, own = name.partition(":")
    if name in POLICIES:
        return POLICIES[name]
    if not own:
        raise SystemExit(f"expected one of {', '.join(POLICIES)} or FILE.py:CLASS, got {name!r}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: type[NamedPolicy] = getattr(module, own)
    return found


def slo_of(scenario: Scenario) -> Slo:
    """Return the targets of its requests; the daemon's where it has none."""
    ttft, tpot = Config().targets(device="cuda")
    return Slo(scenario.slo_ttft or ttft, scenario.slo_tpot or tpot, scenario.slo_e2e)


def script_of(trace: Trace) -> tuple[list[tuple[float, ToEngine]], dict[str, JobPlan]]:
    """What arrives when, and how long the jobs are."""
    own, script, plans = trace.scenario, list[tuple[float, ToEngine]](), dict[str, JobPlan]()
    slo = slo_of(own)
    for each in trace.arrivals:
        if isinstance(each, PromptArrival):
            adapter = None if each.adapter is None else AdapterRef(each.adapter, 1)
            prompt = (1,) * (max(1, len(each.prompt) // 4) if isinstance(each.prompt, str) else len(each.prompt))
            sampling = SamplingParams(max_tokens=each.max_tokens)
            script.append((each.at, Generate(f"r{each.index}", prompt, sampling, adapter, slo)))
        else:
            spec = job_spec(f"j{each.index}")
            tokens = sum(own.row_tokens or max(1, len("".join(map(str, row.values()))) // 4) for row in each.rows)
            steps = own.steps or max(1, round(own.epochs * tokens / own.batch_tokens))
            plans[spec.id] = JobPlan(steps, LAYERS, 1 << 30, None)
            script.append((each.at, StartJob(spec=spec)))
    return script, plans


async def _play(
    trace: Trace,
    policy: type[NamedPolicy],
    config: Config,
    script: Sequence[tuple[float, ToEngine]],
    plans: dict[str, JobPlan],
) -> tuple[Recording, float]:
    """Play the trace; return what was sent, and training's seconds, alone, in the arrival window."""
    loop, rng, beside, divided = (
        asyncio.get_running_loop(),
        random.Random(0),
        policy.stream,
        policy.stream == "partition",
    )
    share = config.training_sm_share
    gpu = SharedGpu(1 - share, share, divided=True) if divided else SharedGpu(STEP_SPEED, TRAIN_SPEED)
    generator = SharingGenerator(
        lambda shape: slower(rng) * step_seconds(shape, *STEP),
        1.5e-3,
        config.step_tokens or 2048,
        rng,
        max_running=min(config.max_running, config.inference_batch_size) if policy.in_batches else config.max_running,
        max_queue=1 << 30,
        fair=not policy.in_batches,
    )
    generator.gpu = gpu
    trainer = (WholeTrainer if beside is None else SharingTrainer)(Meter(), FREE, plans, rng, loop.time, gpu=gpu)
    slices, tokens = Noise(rng, 0.03, 1 / 300), trace.scenario.batch_tokens
    trainer.batch_tokens = lambda step: tokens
    trainer.seconds = lambda kind, tokens: (
        0.0 if kind is MicroStep.RESULT else slices(MICRO_SECONDS[kind] * tokens / BATCH_TOKENS)
    )
    marks = TURNS if beside is None else Marks(gpu.mark, gpu.between, gpu.mark_step) if not divided else Marks(gpu.mark)
    made, begin = policy.made(config, config.targets(device="cuda")[1]), trace.scenario.lead
    jobs = JobPlaces(config.max_active_jobs, Inline(), first_come=policy.in_batches)
    end = begin + trace.scenario.duration
    link = await play(script, generator, trainer, made, marks, end, jobs)
    return link, gpu.trained_at(end) - gpu.trained_at(begin)


def row(trace: Trace, policy: type[NamedPolicy], config: Config) -> Row:
    """Play the trace under a policy."""
    fake_ports.CONTEXT = 1 << 20
    script, plans = script_of(trace)
    link, trained = run_virtual(_play(trace, policy, config, script, plans))
    own, slo = trace.scenario, slo_of(trace.scenario)
    limits = own.slo_ttft, own.slo_tpot, own.slo_e2e
    limits = (slo.ttft, slo.tpot, None) if limits == (None, None, None) else limits
    times, ttfts, tpots, ends, good = token_times(link), list[float](), list[float](), list[float](), 0
    for at, request in script:
        if isinstance(request, Generate):
            first, last = times[request.id][0] - at, times[request.id][-1] - at
            tpot = (last - first) / max(1, len(times[request.id]) - 1)
            good += all(
                limit is None or value <= limit for value, limit in zip((first, tpot, last), limits, strict=True)
            )
            ttfts, tpots, ends = [*ttfts, first], [*tpots, tpot], [*ends, last]
    micro_steps = {MicroStep.FORWARD: LAYERS - 1, MicroStep.HEAD: LAYERS // 2, MicroStep.BACKWARD: LAYERS}
    alone = sum(seconds * micro_steps.get(kind, 1) for kind, seconds in MICRO_SECONDS.items())
    speed = trained / alone * BATCH_TOKENS / trace.scenario.duration
    ttfts.sort()
    return Row(median(ttfts), ttfts[len(ttfts) * 99 // 100], median(tpots), mean(ends), good / len(ttfts), speed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a workload that `coserve bench --save` wrote")
    parser.add_argument("--policies", default=",".join(POLICIES), help="names of the daemon's, or FILE.py:CLASS")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the daemon")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # of stalls, which some policies cause on purpose
    given: dict[str, Any] = {}
    for name, _, value in (each.partition("=") for each in options.set):
        if name not in Config.__dataclass_fields__:
            parser.error(f"--set: expected a setting of the daemon, got {name!r}")
        given[name] = parse_setting(Config, name, value)
    trace = load_trace(options.trace)
    print(*(f"{cell:>16}" for cell in COLUMNS), sep="")
    for name in options.policies.split(","):
        found = row(trace, policy_of(name), Config(**given))
        cells = (f"{found.ttft_p50:.3f}", f"{found.ttft_p99:.3f}", f"{1e3 * found.tpot:.1f}", f"{found.e2e:.2f}")
        shown = name.rpartition(":")[2], *cells, f"{found.in_targets:.1%}", f"{found.training:,.0f}"
        print(*(f"{cell:>16}" for cell in shown), sep="", flush=True)


if __name__ == "__main__":
    main()
